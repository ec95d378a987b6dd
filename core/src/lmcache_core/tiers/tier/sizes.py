"""How large objects turn out to be on a medium: known only once they are encoded. Pure; on the loop's thread."""

from __future__ import annotations

_DECAY = 8  # how many smaller objects it takes until about as much less is expected


class Sizes:
    """What to expect of an object of a layout: the most of late. Too much is held back from others until the object
    is encoded; too little, and it has to be encoded again."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}  # fingerprint → bytes

    def learn(self, fingerprint: int, nbytes: int) -> None:
        """An object of this layout takes so many bytes."""
        seen = self._seen.get(fingerprint, nbytes)
        self._seen[fingerprint] = max(nbytes, seen - (seen - nbytes) // _DECAY)

    def expected(self, fingerprint: int) -> int | None:
        """Bytes; None where nothing is known yet."""
        return self._seen.get(fingerprint)
