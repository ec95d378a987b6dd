"""Pages of a listing, one after the other, from a service whose answers are not trusted. The cursor has all the state
of a scan. Services page by a token of their own. A general purpose bucket lists names in order; a directory bucket does
not, and has no "start after" either.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lmcache_core.errors import TierError
from lmcache_s3.client import Listed, Listing, Place
from lmcache_s3.errors import Answer

_log = logging.getLogger(__name__)
EMPTY_PAGES_MAX = 1000  # in a row: more than any known run of deleted names
Fetch = Callable[[Place], tuple[Listing, Answer]]


class Cursor(NamedTuple):
    """Where a scan continues. `first` and `last` identify the first and the latest page, for buckets without an
    order."""

    token: str = ""
    after: str = ""  # the last name that came
    first: str = ""
    last: str = ""
    empty: int = 0  # pages without a name, in a row

    @classmethod
    def read(cls, text: str | None) -> Cursor:
        """Raises `TierError` for a text that `write` did not make."""
        if text is None:
            return cls()
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            text = f"{text[:80]!r} is not a cursor of an S3 scan: begin without one"
            raise TierError(text, retryable=False) from error

    def write(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"))


class Page(NamedTuple):
    found: Sequence[Listed]
    cursor: str | None
    answer: Answer


def next_page(fetch: Fetch, text: str | None, tier: str, ordered: bool) -> Page:
    """The page at the cursor, and the cursor of the next page. Ends if the service repeats a page: it would do so
    forever. Raises `TierError` if it says that more follows, but not how to get it."""
    at = Cursor.read(text)
    listing, answer = fetch(Place(at.token, at.after if ordered else ""))
    if at.token and at.after and ordered and answer.status == 400:
        # After a pause of the scan, the token may be too old for the service.
        listing, answer = fetch(Place("", at.after))
    if not answer.ok:
        return Page([], None, answer)
    digest = _digest(listing.found)
    if _repeats(at, listing, digest, ordered):
        _log.warning("tier %r: the service lists names again that it has listed before: the scan ends", tier)
        return Page([], None, answer)
    if not listing.more:
        return Page(listing.found, None, answer)
    empty = 0 if listing.found else at.empty + 1
    if empty > EMPTY_PAGES_MAX:
        raise TierError(f"tier {tier!r}: {empty:,} pages without a name came one after the other", retryable=True)
    if not listing.token and not (listing.found and ordered):
        raise TierError(
            f"tier {tier!r}: the service returned a part of the listing, and no token for the rest", retryable=True
        )
    after = listing.found[-1].name if listing.found else at.after
    return Page(listing.found, Cursor(listing.token, after, at.first or digest, digest, empty).write(), answer)


def _repeats(at: Cursor, listing: Listing, digest: str, ordered: bool) -> bool:
    if not listing.found:
        return listing.more and bool(at.token) and listing.token == at.token
    if ordered:
        # A page that begins before the end of the last one is a repeated page, or the listing has started again.
        return bool(at.after) and _utf8(listing.found[0]) <= at.after.encode()
    return digest in (at.first, at.last)


def _utf8(one: Listed) -> bytes:
    return one.name.encode()


def _digest(found: Sequence[Listed]) -> str:
    """A digest of the names of a page; empty for none."""
    if not found:
        return ""
    names: Any = hashlib.blake2b(digest_size=8)
    for one in found:
        names.update(one.name.encode() + b"\0")
    return str(names.hexdigest())
