"""What every test here goes by: no test fails because the machine is busy.

Hypothesis would fail an example that takes 200 ms, and a test whose examples are slow to make. Neither says anything of
what is tested on a machine that does other things at the same time; pytest-timeout ends what hangs.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from lmcache_core.kernel import Kernel
from lmcache_core.limits import CALL_OBJECTS_MAX

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
