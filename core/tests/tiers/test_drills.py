"""`wrap` in a tier's settings: how a wrapper of a package is found."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from lmcache_core.errors import UsageError
from lmcache_core.tiers import drills


def found(monkeypatch: pytest.MonkeyPatch, **wrappers: str) -> None:
    entries = EntryPoints(EntryPoint(name, value, drills.GROUP) for name, value in wrappers.items())
    monkeypatch.setattr(drills, "entry_points", lambda group: entries.select(group=group))


def test_a_word_of_wrap_without_a_package_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch)
    with pytest.raises(UsageError, match="'latency:1' is not known: pip install lmcache-mock"):
        drills.parse_wrap("latency:1")


def test_an_unknown_word_of_wrap_is_refused_with_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, slow="a:b", broken="c:d")
    with pytest.raises(UsageError, match="'fast' is not known: use one of broken, slow"):
        drills.parse_wrap("fast")


@pytest.mark.parametrize("value", ["no_such_module:wrap", "json:no_such_name"])
def test_a_wrapper_that_cannot_be_imported_is_refused_with_its_place(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    found(monkeypatch, slow=value)
    with pytest.raises(UsageError, match=f"'slow' cannot be used: {value}"):
        drills.parse_wrap("slow")
