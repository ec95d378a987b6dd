"""What every test here goes by: no test fails because the machine is busy.

Hypothesis would fail an example that takes 200 ms, and a test whose examples are slow to make. Neither says anything of
what is tested on a machine that does other things at the same time; pytest-timeout ends what hangs.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from lmcache_core.kernel import Kernel
from lmcache_core.limits import CALL_OBJECTS_MAX
from lmcache_testing.embedded import embedded_server

if TYPE_CHECKING:
    from lmcache_core.client.client import Client
    from lmcache_core.server.server import Server

# Who was started in the background by a shell ignores interrupts, and so does all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def every_call_is_bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No call into a kernel of this process costs more than its own batch and one step."""
    noted: list[int] = []
    monkeypatch.setattr(Kernel, "call_objects_max", CALL_OBJECTS_MAX)
    monkeypatch.setattr(Kernel, "long_calls", noted)
    yield
    assert not noted, f"calls into the kernel touched {noted} objects; the limit is {CALL_OBJECTS_MAX}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a command that failed had printed stands in the report."""
    report = yield
    if call.excinfo is not None and isinstance(error := call.excinfo.value, subprocess.CalledProcessError):
        report.sections.extend((f"{name} of the command", str(printed)) for name, printed in
                               (("stdout", error.stdout), ("stderr", error.stderr)) if printed)  # fmt: skip
    return report


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server in this process with these settings, as `embedded_server` of the kit has them."""
    with ExitStack() as stack:
        yield lambda registry=None, **tables: stack.enter_context(embedded_server(tmp_path, registry, **tables))


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.connect() as client:
        yield client
