"""What this package adds to lmcache-core: a bench. The hosts find their shims by module and class, and not here."""

from __future__ import annotations

from argparse import _SubParsersAction
from typing import Any

from lmcache_core import PluginInfo, hookimpl


@hookimpl
def lmcache_plugin_info() -> PluginInfo:
    """The hook API that this was written for."""
    return PluginInfo(api=1, summary="our tiers in other hosts, and a bench beside theirs")


@hookimpl
def lmcache_add_commands(benches: _SubParsersAction[Any]) -> None:
    """Add `bench mlperf-kv`, which is imported only when chosen."""
    from lmcache_core.cli.bench import add_bench

    summary = "MLPerf Storage's KV-cache benchmark over our disk tier, and over its own"
    add_bench(benches, "mlperf-kv", summary, "lmcache_hosts.mlperf_kv")
