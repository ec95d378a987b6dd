"""What went wrong with a tier last. Pure: `now` comes in."""

from __future__ import annotations

from lmcache_core.limits import TIER_ERROR_KEPT_S


class Trouble:
    """The last error of each thing that is tried (lookup, load, store, scan, …), until that goes well again.

    An error of something that is not tried any more goes when the tier answers anything else, after a while.
    """

    def __init__(self) -> None:
        self._errors: dict[str, tuple[float, str]] = {}

    def note(self, what: str, error: str, now: float) -> None:
        self._errors.pop(what, None)  # the newest stands last
        self._errors[what] = (now, error)

    def well(self, what: str, now: float) -> None:
        """It was tried, and went well."""
        if self._errors:
            self._errors.pop(what, None)
            old = [each for each, (at, _) in self._errors.items() if now - at > TIER_ERROR_KEPT_S]
            for each in old:
                del self._errors[each]

    @property
    def text(self) -> str:
        """The last error; empty when the tier is well."""
        return next(reversed(self._errors.values()))[1] if self._errors else ""

    def age_s(self, now: float) -> float | None:
        """How long ago it was; None when the tier is well."""
        return now - next(reversed(self._errors.values()))[0] if self._errors else None
