"""Loaded by pytest if lmcache-core is installed: a fixture, the kit's options, and how its tests run. Imports only
pytest until a contract is tested."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lmcache_core.tiers.contract import AdapterContext
    from lmcache_testing.speeds import Kit

SPEEDS = ("quick", "full", "soak", "chaos")
_CLOSE_S = 10.0
_HOME = "lmcache_testing.contract"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lmcache-core")
    group.addoption(
        "--kit",
        choices=SPEEDS,
        default="quick",
        help="how thorough the conformance kit is: quick (default, below 30 s on a local medium), full, "
        "soak (full, and random work for --kit-seconds), chaos (full, and faults, threads and kills for as long)",
    )
    group.addoption(
        "--kit-seconds", type=float, default=60.0, help="duration of soak and of chaos (default: %(default)s)"
    )
    group.addoption("--kit-seed", type=int, default=0, help="seed of soak and of chaos (default: %(default)s)")
    group.addoption("--kit-card", metavar="FILE", help="print the score card, and write it to FILE as JSON")
    # Options of `plugins certify`, for the process that it starts.
    group.addoption("--kit-journal", metavar="FILE", help=argparse.SUPPRESS)
    group.addoption("--kit-tier", metavar="FILE", help=argparse.SUPPRESS)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--kit-card", None):
        from lmcache_testing.card import CardWriter

        config.pluginmanager.register(CardWriter(config.getoption("--kit-card"), config.getoption("--kit")))
    if config.getoption("--kit-journal", None):
        from lmcache_testing.journal import JournalWriter

        config.pluginmanager.register(JournalWriter(config.getoption("--kit-journal")))


def _contract(item: Any) -> Any:
    """The contract class of a test, if it is a contract test."""
    home, cls = sys.modules.get(_HOME), getattr(item, "cls", None)
    return cls if home is not None and cls is not None and issubclass(cls, home.Contract) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run contract tests under a watchdog: a hanging test fails, and the rest continues."""
    cls = _contract(pyfuncitem)
    if cls is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    sys.modules[_HOME].run_watched(cls, pyfuncitem.name, lambda: pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: Any) -> Any:
    """An adapter that hangs may also hang in its close."""
    if not getattr(_contract(item), "_hung", None):
        return (yield)
    from lmcache_testing.watch import alarm

    with alarm(_CLOSE_S):
        return (yield)


@pytest.fixture
def kit(request: pytest.FixtureRequest) -> Kit:
    """How thorough the kit is."""
    from lmcache_testing.speeds import Kit

    option = request.config.getoption
    return Kit(option("--kit"), option("--kit-seconds"), option("--kit-seed"))


@pytest.fixture
def adapter_context() -> AdapterContext:
    """The context that the server gives an adapter; its requests really run in parallel."""
    from dataclasses import replace
    from functools import partial

    from lmcache_core.tiers.tier.parallel import adapter_context
    from lmcache_testing.stepping import in_line

    made = adapter_context("contract", connections=4)
    return replace(made, run_parallel=partial(in_line, otherwise=made.run_parallel))
