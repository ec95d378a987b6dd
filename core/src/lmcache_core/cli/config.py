"""`lmcache-core config`: the composed settings, and where each came from. Secrets stay hidden."""

from __future__ import annotations

import argparse
import json

from lmcache_core.cli.compose import add_settings_options, composed, print_settings_help
from lmcache_core.cli.table import print_table


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options other than settings."""
    add_settings_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object: name → value, origin, where")


def run(arguments: argparse.Namespace) -> int:
    """Print; 0."""
    if arguments.help:
        print_settings_help(arguments)
        return 0
    found = composed(arguments)
    from lmcache_core.settings.present import rows

    if arguments.json:
        shown = {
            row.name: {"value": row.value, "origin": row.provenance.origin, "where": row.provenance.where}
            for row in rows(found)
        }
        print(json.dumps(shown, indent=2))
    else:
        print_table(("setting", "value", "origin"), [(row.name, row.text, str(row.provenance)) for row in rows(found)])
    return 0
