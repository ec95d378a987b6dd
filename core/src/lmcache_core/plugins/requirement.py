"""Whether a plugin's `Requires-Dist` allows this lmcache-core. What it cannot read is allowed, as pip decides."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_OURS = re.compile(
    r"lmcache[-_.]core\s*(?:\[[^]]*\])?(?![\w.-])(?P<versions>[^;@]*)(?P<rest>.*)", re.IGNORECASE | re.DOTALL
)
_ONE = re.compile(r"(?P<how>~=|==|!=|<=|>=|<|>)\s*v?(?P<release>\d+(?:\.\d+)*)(?P<any>\.\*)?")
_HOW: dict[str, Callable[[list[int], list[int]], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip


def asks_for_us(requirement: str) -> bool:
    """Whether it is about lmcache-core, whatever is installed: with no marker, and no address."""
    found = _OURS.match(requirement)
    return found is not None and not found["rest"].strip()


def allows(requirement: str, version: str) -> bool:
    """Whether a requirement of lmcache-core allows this version. Only releases are compared."""
    found = _OURS.match(requirement)
    here = _release(version)
    versions = found["versions"].strip().strip("()") if found is not None else ""
    return all(_allows_one(one.strip(), here) for one in versions.split(",") if one.strip())


def _allows_one(text: str, here: list[int]) -> bool:
    one = _ONE.fullmatch(text)
    if one is None:  # a pre-release, an arbitrary equality
        return True
    wanted, how = _release(one["release"]), one["how"]
    if how == "~=":
        return _compared(">=", here, wanted) and here[: len(wanted) - 1] == wanted[:-1]
    return _compared(how, here[: len(wanted)] if one["any"] else here, wanted)


def _compared(how: str, here: list[int], wanted: list[int]) -> bool:
    longest = max(len(here), len(wanted))
    return _HOW[how](*([*each, *[0] * (longest - len(each))] for each in (here, wanted)))


def _release(version: str) -> list[int]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return [int(part) for part in found[0].split(".")] if found else []
