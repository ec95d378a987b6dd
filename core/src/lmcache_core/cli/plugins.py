"""`lmcache-core plugins`: what is installed, what it can do, what was refused and why."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lmcache_core.cli.table import print_table
from lmcache_core.errors import CacheError
from lmcache_core.plugins.components import ComponentSpec, Kind

if TYPE_CHECKING:
    from lmcache_core.plugins.records import PluginRecord
    from lmcache_core.plugins.registry import Registry


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options, of `plugins` and of `plugins list`."""
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`, which may stand before the action, too: an action without it does not take it back."""
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print; returns 0."""
    return _list(arguments.registry, "json" in arguments)


def _list(registry: Registry, as_json: bool) -> int:
    if as_json:
        plugins = [_record(registry, record) for record in registry.plugins]
        refused = [
            {"name": each.name, "distribution": each.distribution, "version": each.version, "why": each.why}
            for each in registry.refused
        ]
        print(json.dumps({"plugins": plugins, "refused": refused}, indent=2))
        return 0
    rows = []
    for record in registry.plugins:
        for position, spec in enumerate(record.components or (None,)):
            whose = (record.name, f"{record.distribution} {record.version}", f"{record.load_s * 1e3:.0f}")
            what = (
                ("", "", "") if spec is None else (str(spec.kind).replace("_", " "), spec.name, _able(registry, spec))
            )
            rows.append((*(whose if position == 0 else ("",) * 3), *what))
    columns = ("plugin", "from", "load ms", "kind", "component", "about")
    print_table(columns, rows, right=(2,))
    if registry.refused:
        print()
        print_table(
            ("refused", "from", "why"),
            [(each.name, f"{each.distribution} {each.version}", each.why) for each in registry.refused],
        )
    return 0


def _record(registry: Registry, record: PluginRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "api": record.info.api,
        "summary": record.info.summary,
        "load_s": record.load_s,
        "components": [
            {
                "kind": spec.kind,
                "name": spec.name,
                "summary": spec.summary,
                "factory": spec.factory,
                "settings": spec.settings,
                **capabilities(registry, spec),
            }
            for spec in record.components
        ],
    }


def capabilities(registry: Registry, spec: ComponentSpec) -> dict[str, Any]:
    """An adapter's declared capabilities, or why they cannot be read; empty for other kinds."""
    if spec.kind is not Kind.L2_ADAPTER:
        return {}
    try:
        declared = registry.factory(spec.kind, spec.name).capabilities
        return {"capabilities": asdict(declared)}
    except (CacheError, AttributeError, TypeError) as error:
        return {"capabilities": None, "error": str(error)}


def _able(registry: Registry, spec: ComponentSpec) -> str:
    found = capabilities(registry, spec)
    if found.get("capabilities") is None:
        return str(found.get("error", spec.summary))
    return ", ".join(name for name, value in found["capabilities"].items() if value is True)
