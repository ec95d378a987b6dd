"""The former name of `lmcache_core.tiers.tier.parallel`. Deprecated since 0.1, gone in 0.2."""

from lmcache_core.tiers.moved import moved

__getattr__ = moved(__name__, "lmcache_core.tiers.tier.parallel")
