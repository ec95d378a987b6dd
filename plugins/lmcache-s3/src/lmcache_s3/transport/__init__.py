"""Transport to a bucket and back: connections, signatures, and the two transports for payloads."""
