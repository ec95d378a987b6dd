"""What all contract classes have in common: their tests cannot be overridden in silence, end, and fail in words."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

import pytest

from lmcache_core.testing.watch import NotBackError, alarm

_DUMP = re.compile(r"""\bb(?P<quote>['"])(?:\\.|(?!(?P=quote)).){24,}(?P=quote)""", re.DOTALL)  # of more than a few
_WORDS_MAX = 500
_KIT = __name__.rpartition(".")[0] + "."
_OUTCOMES = pytest.skip.Exception, pytest.fail.Exception, pytest.xfail.Exception
_HUNG_MAX = 2  # tests of one class that may hang before the others are not run any more


class Contract:
    """Base of the contract classes. A subclass brings fixtures; the tests are the contract's.

    A test that a component is known to fail is named in the subclass, with the reason:

        @pytest.mark.xfail(reason="the service keeps no order")
        def test_…(self, adapter): super().test_…(adapter)

    Any other way to replace a test is a TypeError when the class is made.
    """

    component: ClassVar[str] = ""  # the component's name in the registry, for tests that walk the registry
    by_settings: ClassVar[bool] = False  # True: nobody can bring a fixture, and what needs one is not judged
    limit_s: ClassVar[float] = 120.0  # a test that takes longer hangs: it fails, and says where

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


def claim_of(test: str) -> str:
    """The claim that a test is named after: a sentence without its full stop."""
    return test.partition("[")[0].removeprefix("test_").replace("_", " ")


def _reason_to_fail(found: Any) -> bool:
    marks = getattr(found, "pytestmark", [])
    return callable(found) and any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks)


def missing(cls: type[Contract], fixture: str, why: str) -> NoReturn:
    """Fail for a fixture that the component's own claims ask for."""
    if cls.by_settings:
        not_judged(f"{why}: a fixture {fixture!r} unlocks it, which only a test class can bring")
    pytest.fail(f"{cls.__name__} has no fixture {fixture!r}, and {why}", pytrace=False)


NOT_JUDGED = "not judged: "
NOT_CLAIMED = "not claimed: "


def not_judged(why: str) -> NoReturn:
    """The claim may hold or not: nothing here can tell. `why` names what would unlock it."""
    pytest.skip(NOT_JUDGED + why)


def not_claimed(what: str) -> NoReturn:
    """The component does not promise this."""
    pytest.skip(NOT_CLAIMED + what)


def run_watched(cls: type[Contract], test: str, call: Callable[[], Any]) -> None:
    """Run one contract test. It fails in words: the claim, and what was seen; also where it hangs, or where the
    component raises what it should have answered."""
    hung: list[str] = cls.__dict__.get("_hung", [])
    if len(hung) >= _HUNG_MAX:
        pytest.fail(f"{claim_of(test)}: not run, because {' and '.join(hung)} did not come back", pytrace=False)
    try:
        with alarm(cls.limit_s):
            call()
    except (*_OUTCOMES, KeyboardInterrupt):
        raise
    except NotBackError as error:
        cls._hung = [*hung, test]  # type: ignore[attr-defined]
        raise AssertionError(f"{claim_of(test)}: {error}") from None
    except AssertionError as error:
        words = str(error).partition("\nassert ")[0]  # pytest shows the values: thousands of bytes, maybe
        error.args = (f"{claim_of(test)}: {words or 'it does not'}",)
        raise
    except Exception as error:
        first = _first_of(error)
        if isinstance(first, AssertionError):
            raise AssertionError(f"{claim_of(test)}: {first}") from error
        raise AssertionError(f"{claim_of(test)}: a call raised {raised(first)}, and was to answer") from error


def raised(error: BaseException) -> str:
    """An exception for people: its type, its words without dumps of bytes, and the line that raised it."""
    words = _DUMP.sub("some bytes", str(error))[:_WORDS_MAX]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name} ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {words}' if words else ''}{where}"


def _first_of(error: BaseException) -> BaseException:
    """Of several at once (Hypothesis found two faults, or another one at the second try) the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
