"""lmcache-core's L2 adapters inside other KV caches. Nothing of a host is imported before it asks for its shim."""
