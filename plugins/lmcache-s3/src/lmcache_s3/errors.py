"""A service's answers, and what they mean: outcomes, and messages that a person can act on."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

from lmcache_core.errors import TierError
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
    """There was no answer. The message says why, and what a person can do, if only a person can help."""

    def __init__(self, happened: str, retryable: bool = True, *, cure: str = "") -> None:
        super().__init__(f"{happened}: {cure}" if cure else happened)
        self.happened = happened
        self.cure = cure
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
    def names_object(self) -> bool:
        """What a service answers for an object that it has now. A proxy or a login page answers 200, too."""
        return self.ok and "etag" in self.headers

    @property
    def absent(self) -> bool:
        """The object does not exist. (HEAD cannot distinguish a missing bucket.)"""
        return self.status == 404 and self.code != "NoSuchBucket"

    @property
    def throttled(self) -> bool:
        return self.status in (429, 503) or self.code in THROTTLES

    @property
    def full(self) -> bool:
        return self.code in FULL or self.status == 507

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
        """The outcome of an answer that is not 2xx, or names no object."""
        result = Result.THROTTLED if answer.throttled else Result.FULL if answer.full else Result.FAILED
        return Outcome.of(self.refused(what, answer), result)

    def refused(self, what: str, answer: Answer) -> TierError:
        """The same of a whole call."""
        message = f"tier {self._tier!r} cannot {what}: bucket {self._bucket!r} answered {answer.status} " + (
            answer.code or "no code"
        )
        if answer.ok:
            cure = f"check l2.{self._tier}.endpoint_url: a proxy or a login page may stand between"
            return TierError(
                f"{message.removesuffix(' no code')} without an ETag, as no S3 does", cure=cure, retryable=True
            )
        again = answer.throttled or (retryable(answer) and not answer.full)
        return TierError(message, cure=self._cure(answer), retryable=again)

    def unanswered(self, what: str, error: LinkError) -> TierError:
        message = f"tier {self._tier!r} cannot {what} in bucket {self._bucket!r}: {error.happened}"
        cure = error.cure or f"check l2.{self._tier}.endpoint_url, the credentials, and the network"
        return TierError(message, cure=cure, retryable=error.retryable)

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
        if answer.full:
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
