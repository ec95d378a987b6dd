"""Commands for those who run lmcache-core: watch one, size a pool, and load, check and copy what a tier has."""
