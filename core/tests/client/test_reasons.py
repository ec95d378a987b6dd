"""One word for one reason: its name in lower case, in the kernel, in the tiers and in what people read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lmcache_core.client.why.explaining import counted_reasons, sentences
from lmcache_core.kernel.answers import Reason
from lmcache_core.tiers.l1 import TierReason


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_written_as_its_name_and_has_a_sentence(reason: Reason) -> None:
    assert str(reason) == f"{reason}" == reason.name.lower()
    assert sentences()[str(reason)]


@pytest.mark.parametrize("reason", TierReason)
def test_a_tier_calls_a_reason_as_its_name_says(reason: TierReason) -> None:
    assert str(reason) == reason.name.lower()


def test_what_is_counted_is_explained_under_the_same_word() -> None:
    assert all(name == reason.word for name, reason in counted_reasons().items())


def test_a_client_loads_the_words_of_tiers_and_nothing_of_what_runs_them() -> None:
    """Each rank of an engine is a client, and tiers are run by the server."""
    program = "import sys, lmcache_core.client.client; print(*sorted(n for n in sys.modules if '.tiers' in n))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["lmcache_core.tiers", "lmcache_core.tiers.l1"]
