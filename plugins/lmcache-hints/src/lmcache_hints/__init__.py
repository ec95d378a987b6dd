"""KV hints of routers and engines, executed by a server of lmcache-core. Callers need `lmcache_hints.envelope`."""
