"""Whether a host is the one that a shim was written for."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lmcache_core.errors import SettingsError

__all__ = ["HostInterface"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostInterface:
    """What a shim implements of a host. `calls`: the parameters, without `self`, with which the host calls each
    method. `proved`: the versions with which the shim's tests run."""

    host: str
    distributions: Sequence[str]
    proved: Sequence[str]
    calls: Mapping[str, Sequence[str]]

    def check(self, base: type, shim: type) -> None:
        """Raises `SettingsError` if the host's class is another interface than the one that `shim` implements. A
        version that was not proved, with the same interface, is a warning."""
        found = self.version()
        if trouble := self._differences(base, shim):
            raise SettingsError(
                f"{self.host} {found or 'of an unknown version'} has another interface than this shim knows: "
                + "; ".join(trouble),
                cure=f"install {self.host} {' or '.join(self.proved)}, or a version of lmcache-hosts that names yours",
            )
        if found not in self.proved:
            log.warning(
                "%s %s was not proved with lmcache-hosts, but it has the interface of %s, which was",
                self.host,
                found or "of an unknown version",
                ", ".join(self.proved),
            )

    def version(self) -> str:
        """The installed version; empty if its metadata are not there."""
        for name in self.distributions:
            try:
                return version(name).partition("+")[0]
            except PackageNotFoundError:
                continue
        return ""

    def _differences(self, base: type, shim: type) -> list[str]:
        differences = []
        for name, wanted in self.calls.items():
            method: Any = getattr(base, name, None)
            if method is None:
                differences.append(f"it has no {name}()")
                continue
            given = [each for each in inspect.signature(method).parameters if each != "self"]
            if given != list(wanted):
                differences.append(f"{name}() takes {', '.join(given) or 'nothing'}, not {', '.join(wanted)}")
        missing = sorted(getattr(shim, "__abstractmethods__", ()))
        return differences + [f"it wants {name}(), which is new" for name in missing]
