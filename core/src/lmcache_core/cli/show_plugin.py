"""`lmcache-core plugins show NAME`: a plugin or a component, with its capabilities and settings."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from lmcache_core.cli.plugins import add_json, capabilities
from lmcache_core.cli.table import print_table
from lmcache_core.errors import PluginError
from lmcache_core.plugins.components import ComponentSpec
from lmcache_core.plugins.suggest import suggestion

if TYPE_CHECKING:
    from lmcache_core.plugins.records import PluginRecord
    from lmcache_core.plugins.registry import Registry


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("name", nargs="?", metavar="PLUGIN", help="a plugin or a component")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print; returns 0. Raises PluginError for an unknown name."""
    registry, name = arguments.registry, arguments.name
    if name is None:
        raise PluginError("no name given: lmcache-core plugins show NAME")
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
    if "json" in arguments:
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
        **capabilities(registry, spec),
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
