"""`lmcache-core plugins certify`: the conformance kit over a tier of the settings, and its score card."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import PluginError, SettingsError, UsageError

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry

DEFAULT_CONFIG = "lmcache.toml"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this action."""
    group = parser.add_argument_group("certify")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help=f"settings file (default: {DEFAULT_CONFIG} here, if there)"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="a setting of the tier, without l2.TIER; repeatable. {fresh} in it is another name in each test",
    )
    group.add_argument(
        "--through", metavar="SETTING", help="put a proxy that stalls before this port, address or URL of the tier"
    )
    group.add_argument("--tests", metavar="PATH", help="run this test file instead: a package's own, with its fixtures")
    group.add_argument("--kit", choices=["quick", "full", "soak", "chaos"], default="full", help="default: full")
    group.add_argument("--kit-seconds", type=float, default=60.0, help="of soak and chaos (default: 60)")
    group.add_argument("--card", type=Path, metavar="FILE", help="write badge and claims as JSON")
    group.add_argument("--tracebacks", action="store_true", help="show where what fails fails")


def run(arguments: argparse.Namespace) -> int:
    """Print the card; 0 where every claim that was judged holds, 1 otherwise. Raises PluginError, SettingsError and
    UsageError for what cannot be certified."""
    try:
        import pytest

        from lmcache_core.testing.card import CardWriter
    except ImportError as error:
        raise PluginError(
            f"the kit needs pytest and hypothesis: pip install 'lmcache-core[testing]' ({error})"
        ) from None
    if arguments.name is None:
        raise PluginError("say what to certify: lmcache-core plugins certify NAME (a tier, or a type of tiers)")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        written = arguments.card if arguments.card is not None else Path(folder) / "card.json"
        if arguments.json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if arguments.tests is not None:
            # An interpreter of its own: the tests' configuration is theirs, and may ask for one that is fresh.
            command = [sys.executable, "-m", "pytest", *_options(arguments), f"--kit-card={written}", arguments.tests]
            status = subprocess.run(command, check=False, stdout=sys.stdout).returncode
        else:
            writer = CardWriter(written, arguments.kit, every=True, subject=arguments.name)
            plugins = [writer, _described(arguments)]
            status = int(pytest.main([*_options(arguments), *_certified(folder)], plugins=plugins))
        card = json.loads(written.read_text()) if written.exists() else {}
    if not card.get("claims"):
        raise PluginError(f"no claim was tested (pytest ended with {status}): does {arguments.tests or 'it'} have any?")
    if arguments.json:
        print(json.dumps(card, indent=2))
    return 1 if status else 0


def _options(arguments: argparse.Namespace) -> list[str]:
    shown = ["-q", "--no-header", "-rN", "--disable-warnings", f"--tb={'short' if arguments.tracebacks else 'no'}"]
    return [*shown, f"--kit={arguments.kit}", f"--kit-seconds={arguments.kit_seconds}", "-p", "no:cacheprovider"]


def _certified(folder: str) -> list[str]:
    from lmcache_core.testing import certified

    alone = ["-c", os.devnull, f"--rootdir={folder}", "--import-mode=importlib"]  # no configuration of who calls this
    return [str(certified.__file__), *alone]


def _described(arguments: argparse.Namespace) -> Any:
    from lmcache_core.testing.certified import CertifyPlugin, described_tier
    from lmcache_core.tiers.parallel import adapter_context

    registry: Registry = arguments.registry
    described = described_tier(registry, arguments.name, _table(arguments), _texts(arguments), arguments.through)
    if arguments.through is not None:
        described.address()
    described.expect_empty(adapter_context("certify", 1))
    return CertifyPlugin(described)


def _table(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """[l2.NAME] of the settings file."""
    from lmcache_core.settings.sources import read_file, tree_of

    path = arguments.config or (Path(DEFAULT_CONFIG) if Path(DEFAULT_CONFIG).exists() else None)
    if path is None:
        return {}
    here = ("l2", arguments.name)
    leaves = {at[2:]: leaf.value for at, leaf in read_file(path).leaves.items() if at[:2] == here}
    if not leaves and arguments.config is not None:
        raise SettingsError(f"{path} has no table [l2.{arguments.name}]")
    return tree_of(leaves)


def _texts(arguments: argparse.Namespace) -> dict[str, str]:
    texts = {}
    for pair in arguments.set:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {name or pair!r} has no value: write SETTING=VALUE")
        texts[name] = value
    return texts
