"""The package around the component: its entry point, its settings, its bounds on lmcache-core."""

from __future__ import annotations

from lmcache_testing import PluginPackageContract


class TestPackage(PluginPackageContract):
    distribution = "lmcache-postgres"
