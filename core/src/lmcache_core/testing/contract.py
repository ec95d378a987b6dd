"""What all contract classes have in common: their tests cannot be overridden in silence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import pytest

_KIT = __name__.rpartition(".")[0] + "."


class Contract:
    """Base of the contract classes. A subclass brings fixtures; the tests are the contract's.

    A test that a component is known to fail is named in the subclass, with the reason:

        @pytest.mark.xfail(reason="the service keeps no order")
        def test_…(self, adapter): super().test_…(adapter)

    Any other way to replace a test is a TypeError when the class is made.
    """

    component: ClassVar[str] = ""  # the component's name in the registry, for tests that walk the registry

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(_KIT):
            return
        for name, promised in contract_tests(cls):
            found = inspect.getattr_static(cls, name)
            if found is not promised and not _reason_to_fail(found):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, a test of the contract: a known failure is marked with "
                    "@pytest.mark.xfail(reason=…) on that very method; anything else belongs into a test of "
                    "another name"
                )


def contract_tests(cls: type) -> Iterator[tuple[str, Any]]:
    """Name and function of every test that the contracts behind `cls` promise."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith(_KIT):
            for name, value in vars(base).items():
                if name.startswith("test_") and name not in seen:
                    seen.add(name)
                    yield name, value


def _reason_to_fail(found: Any) -> bool:
    marks = getattr(found, "pytestmark", [])
    return callable(found) and any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks)


def missing(cls: type, fixture: str, why: str) -> NoReturn:
    """Fail for a fixture that the component's own claims ask for."""
    pytest.fail(f"{cls.__name__} has no fixture {fixture!r}, and {why}", pytrace=False)
