"""A service's answers, and what they mean: outcomes, and messages that a person can act on."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

from lmcache_core.tiers.contract import Outcome, Result

THROTTLES = frozenset({"SlowDown", "TooManyRequests", "RequestLimitExceeded", "Throttling", "ThrottlingException",
                       "ServiceUnavailable", "Busy", "BandwidthLimitExceeded"})  # fmt: skip
FULL = frozenset({"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "InsufficientCapacity"})
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"})
WRONG_KEY = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch"})
SKEWED = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
OTHER_REGION = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
RETRYABLE = frozenset({"InternalError", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict"})

_CODE = re.compile(rb"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,300})</Message>")


class LinkError(Exception):
    """There was no answer. The message says why."""

    def __init__(self, message: str, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class Answer(NamedTuple):
    """One answer of the service. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    nbytes: int = 0  # of the body; more than the buffers hold if it was not read
    code: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def absent(self) -> bool:
        """The object does not exist. (HEAD cannot distinguish a missing bucket.)"""
        return self.status == 404 and self.code != "NoSuchBucket"

    @property
    def throttled(self) -> bool:
        return self.status in (429, 503) or self.code in THROTTLES

    @property
    def refused_credentials(self) -> bool:
        return self.code in EXPIRED or self.code in WRONG_KEY


def read_error(body: bytes) -> tuple[str, str]:
    """Code and message of S3's XML. Without an XML parser, since the text comes from the network."""
    code, message = _CODE.search(body), _MESSAGE.search(body)
    return (code[1].decode(errors="replace") if code else "", message[1].decode(errors="replace") if message else "")


class Errors:
    """Outcomes and messages of one tier."""

    def __init__(self, tier: str, bucket: str) -> None:
        self._tier = tier
        self._bucket = bucket

    def outcome(self, what: str, answer: Answer) -> Outcome:
        """The outcome of an answer that is not 2xx."""
        if answer.throttled:
            return Outcome(Result.THROTTLED, error=self.refused(what, answer))
        if answer.code in FULL or answer.status == 507:
            return Outcome(Result.FULL, error=self.refused(what, answer))
        return Outcome(Result.FAILED, error=self.refused(what, answer), retryable=retryable(answer))

    def failure(self, what: str, error: LinkError) -> Outcome:
        return Outcome(Result.FAILED, error=self.unanswered(what, error), retryable=error.retryable)

    def refused(self, what: str, answer: Answer) -> str:
        code = answer.code or "no code"
        return f"tier {self._tier!r} cannot {what}: bucket {self._bucket!r} answered {answer.status} {code}: " + (
            self._cure(answer)
        )

    def unanswered(self, what: str, error: LinkError) -> str:
        return f"tier {self._tier!r} cannot {what} in bucket {self._bucket!r}: {error}"

    def _cure(self, answer: Answer) -> str:
        setting = f"l2.{self._tier}"
        if answer.code == "NoSuchBucket":
            return f"create the bucket, or correct {setting}.bucket"
        if answer.code in EXPIRED:
            return "the credentials have expired: renew them where they come from; they are read again"
        if answer.code in WRONG_KEY:
            return f"the access key or its secret is wrong: set {setting}.access_key_id, the profile or the environment"
        if answer.code in SKEWED:
            skew = skew_s(answer.headers)
            by = "" if skew is None else f" by {skew:+.0f} s"
            return f"this machine's clock differs from the service's{by}: correct the clock (chrony, systemd-timesyncd)"
        if answer.code in OTHER_REGION or answer.status in (301, 307, 308):
            region = answer.headers.get("x-amz-bucket-region")
            return f"the bucket is elsewhere: set {setting}.region" + (f' = "{region}"' if region else "")
        if answer.code in FULL or answer.status == 507:
            return f"raise the quota, or lower {setting}.capacity_bytes"
        if answer.status in (401, 403):
            return "allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on the bucket and its prefix"
        if answer.throttled:
            return "the service is throttling; fewer requests are sent until it has recovered"
        return answer.message or "look at the service's log"


def retryable(answer: Answer) -> bool:
    """Whether the same request may succeed later. A refused credential is read again, and retried."""
    return (answer.status >= 500 and answer.status != 501) or answer.code in RETRYABLE or answer.code in EXPIRED


def skew_s(headers: Mapping[str, str]) -> float | None:
    """How far this machine's clock is ahead of the service's, from its Date header."""
    try:
        return time.time() - email.utils.parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None
