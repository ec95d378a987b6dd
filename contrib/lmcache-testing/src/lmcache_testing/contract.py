"""The base of all contract classes: no test is overridden silently or hangs the run, and each failure has a message."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

import pytest

from lmcache_testing.watch import NotBackError, alarm

_DUMP = re.compile(r"""\bb(?P<quote>['"])(?:\\.|(?!(?P=quote)).){24,}(?P=quote)""", re.DOTALL)  # of over 23 bytes
_WORDS_MAX = 500
_KIT = __name__.rpartition(".")[0] + "."
_OUTCOMES = pytest.skip.Exception, pytest.fail.Exception, pytest.xfail.Exception
_HUNG_MAX = 2  # after this many hanging tests of one class, its others are skipped


class Contract:
    """Base of the contract classes. A subclass provides fixtures; the tests come from the contract.

    If a component is known to fail a test, the subclass names it, with the reason:

        @pytest.mark.xfail(reason="the service keeps no order")
        def test_…(self, adapter): super().test_…(adapter)

    Any other replacement of a test raises a TypeError when the class is made.
    """

    component: ClassVar[str] = ""  # the component's name in the registry, for tests that walk the registry
    by_settings: ClassVar[bool] = False  # True: nobody can provide fixtures, and tests that need one are not judged
    limit_s: ClassVar[float] = 120.0  # a longer test counts as hanging: it fails and says where

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(_KIT):
            return
        for name, promised in contract_tests(cls):
            found = inspect.getattr_static(cls, name)
            if found is not promised and not _reason_to_fail(found):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, a test of the contract: mark a known failure with "
                    "@pytest.mark.xfail(reason=…) on that method, and give other tests "
                    "another name"
                )


def contract_tests(cls: type) -> Iterator[tuple[str, Any]]:
    """Name and function of every test in the contracts of `cls`."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith(_KIT):
            for name, value in vars(base).items():
                if name.startswith("test_") and name not in seen:
                    seen.add(name)
                    yield name, value


def claim_of(test: str) -> str:
    """The claim in a test's name: a sentence without its full stop."""
    return test.partition("[")[0].removeprefix("test_").replace("_", " ")


def _reason_to_fail(found: Any) -> bool:
    marks = getattr(found, "pytestmark", [])
    return callable(found) and any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks)


def missing(cls: type[Contract], fixture: str, why: str) -> NoReturn:
    """Fail because a fixture is missing that the component's own claims require."""
    if cls.by_settings:
        not_judged(f"{why}: it needs a fixture {fixture!r}, which only a test class can provide")
    pytest.fail(f"{cls.__name__} has no fixture {fixture!r}, and {why}", pytrace=False)


NOT_JUDGED = "not judged: "
NOT_CLAIMED = "not claimed: "


def not_judged(why: str) -> NoReturn:
    """Skip: nothing here can tell whether the claim holds. `why` names what would make that possible."""
    pytest.skip(NOT_JUDGED + why)


def not_claimed(what: str) -> NoReturn:
    """Skip: the component does not claim this."""
    pytest.skip(NOT_CLAIMED + what)


def run_watched(cls: type[Contract], test: str, call: Callable[[], Any]) -> None:
    """Run one contract test. The failure message has the claim and what was seen, even if the test hangs, or the
    component raises instead of answering."""
    hung: list[str] = cls.__dict__.get("_hung", [])
    if len(hung) >= _HUNG_MAX:
        pytest.fail(f"{claim_of(test)}: not run, because {' and '.join(hung)} did not return", pytrace=False)
    try:
        with alarm(cls.limit_s):
            call()
    except (*_OUTCOMES, KeyboardInterrupt):
        raise
    except NotBackError as error:
        cls._hung = [*hung, test]  # type: ignore[attr-defined]
        raise AssertionError(f"{claim_of(test)}: {error}") from None
    except AssertionError as error:
        text = str(error).partition("\nassert ")[0]  # pytest shows the values, which may be thousands of bytes
        error.args = (f"{claim_of(test)}: {text or 'it does not'}",)
        raise
    except Exception as error:
        first = _first_of(error)
        if isinstance(first, AssertionError):
            raise AssertionError(f"{claim_of(test)}: {first}") from error
        raise AssertionError(f"{claim_of(test)}: a call raised {raised(first)} instead of answering") from error


def raised(error: BaseException) -> str:
    """An exception for people: its type, its message without byte dumps, and the line that raised it."""
    text = _DUMP.sub("some bytes", str(error))[:_WORDS_MAX]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name} ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def _first_of(error: BaseException) -> BaseException:
    """The first of several errors (Hypothesis found two faults, or a different one on the second run)."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
