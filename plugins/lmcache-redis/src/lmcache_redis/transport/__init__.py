"""Transport to Redis and back: connections, the protocol, and which server owns a key."""
