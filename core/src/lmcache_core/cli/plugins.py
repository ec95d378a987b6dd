"""`lmcache-core plugins`: what is installed, what it can do, what was refused and why. Also writes new packages."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.cli import certify
from lmcache_core.cli.lazy import LazyParser
from lmcache_core.cli.new_plugin import TEMPLATES, write_package
from lmcache_core.cli.table import print_table
from lmcache_core.errors import CacheError, PluginError
from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.suggest import suggestion

if TYPE_CHECKING:
    from lmcache_core.plugins.records import PluginRecord
    from lmcache_core.plugins.registry import Registry


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    if isinstance(parser, LazyParser):
        parser.mixes_words = True  # `plugins new --kind serde NAME`
    parser.add_argument(
        "action", nargs="?", choices=["list", "show", "new", "certify"], default="list", help="default: list"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="show: a plugin or a component; new: the name of the component"
    )
    parser.add_argument("--kind", choices=list(TEMPLATES), help="new: the kind of component")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="new: where to make the package's folder (default: here)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    certify.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print; returns 0. Raises PluginError for an unknown name."""
    if arguments.action == "show":
        if arguments.name is None:
            raise PluginError("no name given: lmcache-core plugins show NAME")
        return _show(arguments.registry, arguments.name, arguments.json)
    if arguments.action == "new":
        return _new(arguments)
    if arguments.action == "certify":
        return certify.run(arguments)
    if arguments.name is not None:
        raise PluginError(f"`plugins list` takes no name: lmcache-core plugins show {arguments.name}")
    return _list(arguments.registry, arguments.json)


def _new(arguments: argparse.Namespace) -> int:
    if arguments.name is None or arguments.kind is None:
        raise PluginError(f"no name or kind given: lmcache-core plugins new NAME --kind {'|'.join(TEMPLATES)}")
    folder = write_package(arguments.registry, arguments.name, arguments.kind, arguments.directory)
    go_there = f"cd {shlex.quote(str(folder))}"
    print(f"wrote {folder}; its README has the next steps; first: {go_there} && pip install -e '.[testing]' && pytest")
    return 0


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
                **_capabilities(registry, spec),
            }
            for spec in record.components
        ],
    }


def _capabilities(registry: Registry, spec: ComponentSpec) -> dict[str, Any]:
    """An adapter's declared capabilities, or why they cannot be read; empty for other kinds."""
    if spec.kind is not Kind.L2_ADAPTER:
        return {}
    try:
        declared = registry.factory(spec.kind, spec.name).capabilities
        return {"capabilities": asdict(declared)}
    except (CacheError, AttributeError, TypeError) as error:
        return {"capabilities": None, "error": str(error)}


def _able(registry: Registry, spec: ComponentSpec) -> str:
    found = _capabilities(registry, spec)
    if found.get("capabilities") is None:
        return str(found.get("error", spec.summary))
    return ", ".join(name for name, value in found["capabilities"].items() if value is True)


def _show(registry: Registry, name: str, as_json: bool) -> int:
    found = [
        (record, spec) for record in registry.plugins for spec in record.components if name in (record.name, spec.name)
    ]
    records = [record for record in registry.plugins if record.name == name]
    if not found and not records:
        refused = [each for each in registry.refused if each.name == name]
        if refused:
            raise PluginError(f"plugin {refused[0]}")
        known = {record.name for record in registry.plugins}
        known |= {spec.name for record in registry.plugins for spec in record.components}
        raise PluginError(f"no plugin or component is named {name!r}{suggestion(name, sorted(known))}")
    shown = [_component(registry, record, spec) for record, spec in found]
    if as_json:
        print(json.dumps({"name": name, "components": shown}, indent=2))
        return 0
    for record in records:
        print(f"plugin {record}: {record.info.summary or 'API generation ' + str(record.info.api)}")
    for each in shown:
        title = f"{each['kind']} {each['name']} (plugin {each['plugin']}): {each['summary']}"
        rows = [
            (
                setting["name"],
                setting["type"],
                "required" if setting["required"] else setting["default"],
                setting["description"],
            )
            for setting in each["settings"]
        ]
        if rows:
            print_table(("setting", "type", "default", "description"), rows, title=title)
        else:
            print(f"{title}\nno settings")
    return 0


def _component(registry: Registry, record: PluginRecord, spec: ComponentSpec) -> dict[str, Any]:
    from lmcache_core.settings.present import default_text
    from lmcache_core.settings.schema import fields_of
    from lmcache_core.settings.sources import dotted

    model = registry.settings_model(spec.kind, spec.name)
    return {
        "kind": spec.kind,
        "name": spec.name,
        "plugin": record.name,
        "summary": spec.summary,
        **_capabilities(registry, spec),
        "settings": [
            {
                "name": dotted(setting.path),
                "type": setting.type_text,
                "required": setting.required,
                "default": None if setting.required else default_text(setting),
                "description": setting.description,
            }
            for setting in (fields_of(model) if model is not None else [])
        ],
    }
