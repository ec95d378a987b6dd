"""Which objects can be served: by the index, by the server, for several groups of keys."""
