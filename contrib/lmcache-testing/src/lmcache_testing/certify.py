"""`lmcache-core plugins certify`: run the conformance kit on a configured tier, and print its score card."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.cli.plugins import add_json
from lmcache_core.errors import PluginError, SettingsError, UsageError
from lmcache_core.settings.files import DEFAULT_FILE, find_file

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry
    from lmcache_testing.card import Card
    from lmcache_testing.certified import Described

EMPTY_S = 90.0  # a scan has 60 s for each page; wait no longer for an adapter that ignores its deadline


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a tier of the settings file, or a type of tiers")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"settings file (default: {DEFAULT_FILE} here, if there)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="a setting of the tier, without l2.TIER; repeatable. {fresh} becomes a new name in each test",
    )
    parser.add_argument(
        "--through", metavar="SETTING", help="put a stalling proxy in front of this port, address or URL of the tier"
    )
    parser.add_argument("--tests", metavar="PATH", help="run this test file instead, with the package's own fixtures")
    parser.add_argument("--kit", choices=["quick", "full", "soak", "chaos"], default="full", help="default: full")
    parser.add_argument("--kit-seconds", type=float, default=60.0, help="duration of soak and chaos (default: 60)")
    parser.add_argument("--card", type=Path, metavar="FILE", help="write the badge and the claims as JSON")
    parser.add_argument("--tracebacks", action="store_true", help="show the traceback of each failure")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the card. Returns 0 if every claim that was judged holds, 1 otherwise. Raises PluginError, SettingsError or
    UsageError for what cannot be certified."""
    if arguments.name is None:
        raise PluginError("say what to certify: lmcache-core plugins certify NAME (a tier, or a type of tiers)")
    if arguments.card is not None:
        _expect_writable(arguments.card)
    with tempfile.TemporaryDirectory(prefix="lmcache-certify-") as folder:
        card, status = _certified(arguments, Path(folder))
    if not card.lines:
        raise PluginError(f"no claim was tested (pytest ended with {status}): does {arguments.tests or 'it'} have any?")
    as_json = "json" in arguments
    out = sys.stderr if as_json else sys.stdout
    print(f"score card, speed {card.speed}", file=out)
    print("\n".join(card.table(every=arguments.tests is None)), file=out)
    if arguments.card is not None:
        card.write(arguments.card)
        print(f"written to {arguments.card}", file=out)
    if as_json:
        print(json.dumps(card.as_json(), indent=2))
    return 1 if status else 0


def _certified(arguments: argparse.Namespace, folder: Path) -> tuple[Card, int]:
    """The kit's results, and pytest's exit status."""
    from lmcache_testing.card import Card
    from lmcache_testing.kit_process import run_kit

    options = ["-q", "--no-header", "-rN", "--disable-warnings", f"--tb={_traceback_style(arguments)}"]
    options += [f"--kit={arguments.kit}", f"--kit-seconds={arguments.kit_seconds}", "-p", "no:cacheprovider"]
    if arguments.tests is not None:
        options.append(arguments.tests)
    else:
        options += _tier_options(arguments, folder)
    lines, status = run_kit(options, folder, sys.stderr if "json" in arguments else sys.stdout)
    card = Card(arguments.kit)
    for line in lines:
        card.add(line if arguments.tests is not None else line._replace(subject=arguments.name))
    return card, status


def _traceback_style(arguments: argparse.Namespace) -> str:
    return "short" if arguments.tracebacks else "no"


def _tier_options(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Options for the kit's own test class. The caller's pytest configuration is not used."""
    from lmcache_testing import certified

    about = folder / "tier.json"
    about.write_text(_described(arguments).written(), encoding="utf-8")
    alone = ["-c", os.devnull, f"--rootdir={folder}", f"--basetemp={folder / 'tmp'}", "--import-mode=importlib"]
    return [f"--kit-tier={about}", str(certified.__file__), *alone]


def _described(arguments: argparse.Namespace) -> Described:
    from lmcache_core.tiers.tier.parallel import adapter_context
    from lmcache_testing.certified import described_tier
    from lmcache_testing.watch import NotBackError, watched

    registry: Registry = arguments.registry
    described = described_tier(registry, arguments.name, _table(arguments), _texts(arguments), arguments.through)
    if arguments.through is not None:
        described.address()
    try:
        watched(lambda: described.expect_empty(adapter_context("certify", 1)), EMPTY_S)
    except SettingsError as error:
        raise SettingsError(error.happened, cure="give settings by --set SETTING=VALUE, without l2.TIER") from None
    except NotBackError as error:
        raise UsageError(
            f"cannot tell whether tier {arguments.name!r} is empty: its adapter's scan failed: {error}"
        ) from None
    return described


def _expect_writable(path: Path) -> None:
    """Check before minutes of tests rather than after them."""
    if path.is_dir():
        raise UsageError(f"--card {path}: this is a folder: name a file")
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not os.access(there, os.W_OK) or not (there == path or there.is_dir()):
        raise UsageError(f"--card {path}: {there} is not writable: name a file in a writable folder")


def _table(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """The table [l2.NAME] of the settings file."""
    from lmcache_core.settings.tier import tier_table

    path = find_file(arguments.config)
    table = {} if path is None else tier_table(path, arguments.name)
    if not table and arguments.config is not None:
        raise SettingsError(f"{path} has no table [l2.{arguments.name}]")
    return table


def _texts(arguments: argparse.Namespace) -> dict[str, str]:
    texts = {}
    for pair in arguments.set:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {name or pair!r} has no value: write SETTING=VALUE")
        texts[name] = value
    return texts
