"""How requests get to a bucket and back: connections, signatures, and the two ways for payloads."""
