"""Requests to one bucket: the chosen transport for payloads, boto3 for the rest, all through one gate."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lmcache_core.tiers import budget
from lmcache_s3.errors import Answer, LinkError
from lmcache_s3.settings import S3Settings
from lmcache_s3.transport.account import Account, DirectError
from lmcache_s3.transport.gate import Gate
from lmcache_s3.transport.payloads import Condition, Span, Transport
from lmcache_s3.transport.plain import PlainTransport, called

_log = logging.getLogger(__name__)
CONFIRM_AGAIN_S = 30.0  # for this long "not there" is trusted without checking the bucket again


class Listed(NamedTuple):
    name: str
    nbytes: int
    modified_at_s: float


class Place(NamedTuple):
    """Where a listing continues: at the service's own token, or after a name; with neither, at the beginning."""

    token: str = ""
    after: str = ""


class Listing(NamedTuple):
    """One page. It may be empty, and yet more may follow."""

    found: Sequence[Listed]
    more: bool
    token: str  # for what follows; a service may give none


class S3Client:
    """One bucket. Thread-safe. Raises `LinkError` if no answer came. Nothing is sent before the first request, so a
    service that is down at start is used as soon as it is up.
    """

    def __init__(self, settings: S3Settings, connections: int, tier: str) -> None:
        self._settings = settings
        self._tier = tier
        self.account = Account(settings, connections)
        self._plain = PlainTransport(settings, self.account)
        self._chosen: Transport | None = None
        self._choosing = threading.Lock()
        self._confirmed_at = float("-inf")
        self._batch_delete = True
        self.gate = Gate(connections)

    # --- payloads -----------------------------------------------------------------------------------------
    def put(self, name: str, buffers: Sequence[memoryview], condition: Condition, deadline: float) -> Answer:
        return self._ask(lambda: self._transport().put(name, buffers, condition, deadline), deadline)

    def get(self, name: str, buffers: Sequence[memoryview], span: Span | None, deadline: float) -> Answer:
        return self._ask(lambda: self._transport().get(name, buffers, span, deadline), deadline)

    def head(self, name: str, deadline: float) -> Answer:
        """The answer of GET, without the body. HEAD reports an error without a text, so an error is repeated with GET;
        and so is "not there" if nothing has shown for a while that the bucket exists. Throttling and server errors are
        not repeated."""
        answer = self._ask(lambda: self._transport().head(name, deadline), deadline)
        now = time.monotonic()
        if answer.status == 404 and now - self._confirmed_at < CONFIRM_AGAIN_S:
            return answer
        if not answer.ok and not answer.throttled and answer.status < 500:
            answer = self.get(name, (), None, deadline)
        return answer

    # --- control ------------------------------------------------------------------------------------------
    def delete(self, names: Sequence[str], deadline: float) -> dict[str, Answer]:
        """Errors, by name; a name that is not in the result was deleted, or never existed."""
        if self._batch_delete and len(names) > 1:
            objects = {"Objects": [{"Key": name} for name in names], "Quiet": True}
            result, answer = self._control("delete_objects", deadline, Delete=objects)
            if result is not None:
                errors = [(each.get("Key"), each.get("Code", ""), each) for each in result.get("Errors", [])]
                return {
                    name: Answer(_status(code), {}, 0, code, each.get("Message", ""))
                    for name, code, each in errors
                    if code != "NoSuchKey"
                }
            if answer.status not in (400, 405, 501) or answer.code == "NoSuchBucket" or answer.refused_credentials:
                return dict.fromkeys(names, answer)
        failed = {}
        for name in names:
            result, answer = self._control("delete_object", deadline, Key=name)
            if result is None and not answer.absent:
                failed[name] = answer
        if not failed and len(names) > 1 and self._batch_delete:
            self._batch_delete = False  # single deletes work, batches do not: a store without batch deletes
            _log.info("tier %r: the service knows no batch delete; objects are deleted one by one", self._tier)
        return failed

    def list(self, prefix: str, place: Place, count: int, deadline: float) -> tuple[Listing, Answer]:
        """At most `count` names from `place` on."""
        where = {"Prefix": prefix} if prefix else {}
        if place.token:
            where["ContinuationToken"] = place.token
        elif place.after:
            where["StartAfter"] = place.after
        result, answer = self._control("list_objects_v2", deadline, MaxKeys=count, **where)
        if result is None:
            return Listing([], False, ""), answer
        found = [
            Listed(one["Key"], int(one.get("Size", 0)), _seconds(one.get("LastModified")))
            for one in result.get("Contents", [])
            if one.get("Key")
        ]
        return Listing(found, bool(result.get("IsTruncated")), str(result.get("NextContinuationToken") or "")), answer

    def close(self) -> None:
        with self._choosing:
            if self._chosen is not None:
                self._chosen.close()
        self.account.close()

    @property
    def transport(self) -> str:
        """The transport in use: `direct`, `plain`, or nothing while none was needed."""
        if self._chosen is None:
            return ""
        return "plain" if self._chosen is self._plain else "direct"

    # --- each request -------------------------------------------------------------------------------------
    def _control(self, method: str, deadline: float, **arguments: Any) -> tuple[Any, Answer]:
        kept: list[Any] = []

        def ask() -> Answer:
            client = self.account.client(deadline)
            result, answer = called(lambda: getattr(client, method)(Bucket=self._settings.bucket, **arguments))
            kept[:] = [result]
            return answer

        answer = self._ask(ask, deadline)
        return kept[0], answer

    def _ask(self, request: Callable[[], Answer], deadline: float) -> Answer:
        try:
            with self.gate.entered(deadline), budget.within(deadline):
                answer = request()
        except TimeoutError as error:
            raise LinkError(str(error) or "no answer came in time") from error
        if answer.throttled:
            self.gate.throttled(time.monotonic())
        elif answer.ok or answer.status < 500:
            self.gate.succeeded()
        if answer.refused_credentials:
            self.account.forget()
        if answer.ok or answer.code == "NoSuchKey":
            self._confirmed_at = time.monotonic()
        elif answer.code == "NoSuchBucket":
            self._confirmed_at = float("-inf")
        return answer

    def _transport(self) -> Transport:
        chosen = self._chosen
        if chosen is not None:
            return chosen
        with budget.locked(self._choosing):
            if self._chosen is None:
                self._chosen = self._choose()
            return self._chosen

    def _choose(self) -> Transport:
        if self._settings.transport == "plain":
            return self._plain
        try:
            from lmcache_s3.transport.direct import DirectTransport

            return DirectTransport(self._settings, self.account)
        except (DirectError, ImportError, AttributeError) as error:
            if self._settings.transport == "direct":
                cure = f'set l2.{self._tier}.transport = "auto"'
                raise LinkError(str(error), retryable=False, cure=cure) from error
            _log.warning("tier %r: payloads move by boto3's own calls, which copy: %s", self._tier, error)
            return self._plain


def _seconds(modified: Any) -> float:
    return float(modified.timestamp()) if modified is not None else 0.0


def _status(code: str) -> int:
    """The status that belongs to a code, for codes inside an answer of status 200."""
    return {"AccessDenied": 403, "SlowDown": 503, "ServiceUnavailable": 503, "InternalError": 500}.get(code, 400)
