"""How bytes get to a Redis and back: connections, the protocol, and which server owns a key."""
