"""Modules of tiers that have moved are found under their former names for one release; nothing of ours uses these."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MOVED = {
    "lmcache_core.tiers.format": ("lmcache_core.tiers.object.format", "HEADER_BYTES"),
    "lmcache_core.tiers.transfer": ("lmcache_core.tiers.object.transfer", "Transfer"),
    "lmcache_core.tiers.parallel": ("lmcache_core.tiers.tier.parallel", "adapter_context"),
}


@pytest.mark.parametrize("former", MOVED)
def test_a_former_name_gives_the_same_thing_and_says_where_it_stands_now(former: str) -> None:
    now, name = MOVED[former]
    with pytest.warns(DeprecationWarning, match=re.escape(f"import {name} from {now}")) as said:
        there = getattr(import_module(former), name)
    assert there is getattr(import_module(now), name)
    assert said[0].filename == __file__, "it names the line that imports"


@pytest.mark.parametrize("former", MOVED)
def test_a_name_that_never_was_there_is_not_there(former: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = import_module(former).no_such_name


def test_nothing_of_ours_imports_from_a_former_name() -> None:
    former = "|".join(map(re.escape, MOVED))
    named = re.compile(rf"(?:from|import) (?:{former})\b")
    sources = [path for room in ("core", "plugins", "contrib") for path in (ROOT / room).glob("**/src/**/*.py")]
    assert sources
    assert not [path for path in sources if named.search(path.read_text())]
