"""Services that misbehave as real ones did: no answer is mistaken for another, and every call ends by its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from s3_front import Fault
from services.scripted import Request, Scripted, Talk, answer, chunked, ends, silent_addresses

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import LoadItem, Outcome, Result, ScanEntry, StoreItem
from lmcache_s3.settings import S3Settings

from .conftest import Bucket, Tier
from .s3_front import Front

Make = Callable[..., Tier]
Serve = Callable[[Callable[[Talk], None]], Scripted]
TRANSPORTS = pytest.mark.parametrize("transport", ["direct", "plain"])
ABSENT = b"<Error><Code>NoSuchKey</Code></Error>"


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda script: stack.enter_context(Scripted(script))


def settings(server: Any, **more: Any) -> S3Settings:
    given = {
        "bucket": "bucket",
        "endpoint_url": server if isinstance(server, str) else server.url,
        "region": "us-east-1",
        "access_key_id": "K",
        "secret_access_key": "S",
        "addressing_style": "path",
        **more,
    }
    return S3Settings(**given)


def content(request: Request) -> bytes:
    """Of the object that a request names: 5,000 bytes that are no other object's."""
    return (request.path.encode() + b"|").ljust(5000, request.path[-1:].encode())


def content_of(key: bytes) -> bytes:
    return content(Request("GET", f"/bucket/lmcache/{key.hex()}", {}, b""))


# --- whose answer is it ----------------------------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("page", [b"<html>please log in</html>", b""])
def test_a_login_page_has_stored_nothing_and_finds_nothing(
    serve: Serve, tier: Make, transport: str, page: bytes
) -> None:
    def script(talk: Talk) -> None:
        while request := talk.request():
            talk.send(answer(200, b"" if request.method == "HEAD" else page, "Content-Type: text/html"))

    here = tier(settings(serve(script), transport=transport))
    stored = here.store(b"a", b"content")
    assert (stored.result, stored.retryable) == (Result.FAILED, True)
    assert "without an ETag" in stored.error
    with pytest.raises(TierError, match="without an ETag"):
        here.adapter.exists([b"a"], time.monotonic() + 60)


@TRANSPORTS
@pytest.mark.parametrize("status", [100, 102, 103])
def test_interim_answers_are_skipped(serve: Serve, tier: Make, transport: str, status: int) -> None:
    def script(talk: Talk) -> None:
        while request := talk.request():
            talk.send(answer(status, b"", "Link: </style.css>", length=False) * 3)
            if request.method == "PUT":
                talk.send(answer(200, b"", 'ETag: "1"'))
            else:
                talk.send(answer(200, content(request)))

    here = tier(settings(serve(script), transport=transport))
    for key in (b"a", b"b"):
        assert here.store(key, b"content").result is Result.DONE
        assert here.load(key, 5000) == (Outcome(Result.DONE, 5000), content_of(key))


@TRANSPORTS
@pytest.mark.parametrize("status", [102, 103])
def test_no_request_gets_the_answer_of_another_one(serve: Serve, tier: Make, transport: str, status: int) -> None:
    """The final answer comes late: with the next request, if the client sends one on this connection."""

    def script(talk: Talk) -> None:
        while request := talk.request():
            talk.send(answer(status, length=False))
            talk.asked_again(0.3)
            talk.send(answer(507) if request.method == "PUT" else answer(200, content(request)))

    here = tier(settings(serve(script), transport=transport, skip_existing=False))
    for key in (b"a", b"b", b"a"):
        assert here.load(key, 5000) == (Outcome(Result.DONE, 5000), content_of(key))
        assert here.store(key, b"content").result is Result.FULL


@TRANSPORTS
def test_a_connection_with_bytes_that_belong_to_no_answer_is_not_used_again(
    serve: Serve, tier: Make, transport: str
) -> None:
    """Each answer is sent twice."""

    def script(talk: Talk) -> None:
        while request := talk.request():
            talk.send(answer(200, content(request)) * 2)

    server = serve(script)
    here = tier(settings(server, transport=transport))
    for number, key in enumerate((b"a", b"b", b"c"), start=1):
        assert here.load(key, 5000) == (Outcome(Result.DONE, 5000), content_of(key))
        assert server.connections == number


def test_an_answer_before_the_whole_request_was_taken_ends_the_connection(serve: Serve, tier: Make) -> None:
    """A service that refuses a body closes its side, and says it would keep the connection."""

    def script(talk: Talk) -> None:
        line = talk.sock.recv(200)
        assert line
        talk.send(answer(507))

    server = serve(script)
    here = tier(settings(server, transport="direct", skip_existing=False))
    for number in (1, 2, 3):
        outcome = here.store(b"a", bytes(8 << 20))
        assert outcome.result in (Result.FULL, Result.FAILED)  # the reset may arrive before the answer
        assert server.connections >= number, "none of them was kept"


FORGED = {
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\nContent-Length: 10\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "a length in words": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
    "a length beyond all": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 40 + b"\r\n\r\n",
    "a folded header": b"HTTP/1.1 200 OK\r\nX: a\r\n Content-Length: 5\r\n\r\n",
    "no header": b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
    "no status": b"HELLO\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "a chunk without a size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "a chunk longer than it says": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
    "interim answers without end": b"HTTP/1.1 103 Early\r\n\r\n" * 40,
    "a line without end": b"HTTP/1.1 200 " + b"x" * 200_000,
}


@pytest.mark.parametrize("forged", FORGED)
def test_an_answer_that_cannot_be_understood_is_a_failure_and_the_end_of_its_connection(
    serve: Serve, tier: Make, forged: str
) -> None:
    def script(talk: Talk) -> None:
        while request := talk.request():
            talk.send(FORGED[forged] if talk.number == 0 else answer(200, content(request)))

    here = tier(settings(serve(script), transport="direct"))
    outcome, _ = ends(lambda: here.load(b"a", 5000))
    assert outcome.result is Result.FAILED
    assert outcome.retryable
    assert outcome.error
    assert here.load(b"a", 5000) == (Outcome(Result.DONE, 5000), content_of(b"a"))


# --- bodies ----------------------------------------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("form", ["chunked", "chunked in small pieces", "up to the end"])
def test_an_object_without_a_length_is_loaded(serve: Serve, tier: Make, transport: str, form: str) -> None:
    def script(talk: Talk) -> None:
        while request := talk.request():
            if form == "up to the end":
                talk.send(answer(200, content(request), length=False))
                return
            pieces = chunked(content(request), 1700 if form == "chunked" else 7)
            talk.send(answer(200, b"", "Transfer-Encoding: chunked", length=False), pieces)

    server = serve(script)
    here = tier(settings(server, transport=transport))
    keys = [b"a", b"b", b"c"]
    for sizes in ([5000], [4096, 904], [9000]):
        items = [LoadItem(key, [memoryview(bytearray(size)) for size in sizes]) for key in keys]
        outcomes = here.adapter.load(items, here.deadline)
        assert list(outcomes) == [Outcome(Result.DONE, 5000)] * 3
        for item in items:
            assert b"".join(bytes(part) for part in item.buffers)[:5000] == content_of(item.key)
    assert here.load(b"a", 4999)[0].result is Result.DAMAGED
    if form != "up to the end" and transport == "direct":
        before = server.connections
        assert here.load(b"a", 5000)[0].result is Result.DONE
        assert here.load(b"b", 5000)[0].result is Result.DONE
        assert server.connections <= before + 1, "chunks that were read to their end leave the connection well"


@TRANSPORTS
def test_one_object_that_fails_takes_no_other_of_its_batch_with_it(serve: Serve, tier: Make, transport: str) -> None:
    def script(talk: Talk) -> None:
        while request := talk.request():
            whole = answer(200, content(request))
            if request.path.endswith(b"b".hex()):
                talk.send(whole[:-100])
                return
            talk.send(whole if request.path.endswith(b"a".hex()) else answer(404, ABSENT))

    here = tier(settings(serve(script), transport=transport))
    items = [LoadItem(key, [memoryview(bytearray(5000))]) for key in (b"a", b"b", b"c")]
    outcomes = here.adapter.load(items, here.deadline)
    assert [one.result for one in outcomes] == [Result.DONE, Result.FAILED, Result.MISS]


# --- time ------------------------------------------------------------------------------------------------------

TRICKLED = {
    "a head": b"HTTP/1.1 200 OK\r\nX-Padding: ",
    "a status": b"",
    "an error body": b"HTTP/1.1 500 Internal\r\nContent-Length: 60000\r\n\r\n",
    "an object": b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\nx-amz-request-id: 1\r\n\r\n",
    "a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1388\r\n",
    "interim answers": b"HTTP/1.1 103 Early\r\nLink: ",
}


@TRANSPORTS
@pytest.mark.parametrize(
    ("what", "trickled"),
    [*(("load", each) for each in TRICKLED), ("store", "a head"), ("exists", "a head"), ("scan", "a head"),
     ("scan", "an error body"), ("delete", "an error body")],
)  # fmt: skip
def test_a_service_that_trickles_is_left_by_the_deadline(
    serve: Serve, tier: Make, transport: str, trickled: str, what: str
) -> None:
    def script(talk: Talk) -> None:
        while talk.request():
            talk.send(TRICKLED[trickled])
            talk.trickle_for_ever(b"0")

    here = tier(settings(serve(script), transport=transport))
    soon = time.monotonic() + 0.5
    batches: dict[str, Callable[[], object]] = {
        "load": lambda: here.adapter.load([LoadItem(b"a", [memoryview(bytearray(5000))])], soon),
        "store": lambda: here.adapter.store([StoreItem(b"a", [memoryview(bytes(500))])], soon),
        "delete": lambda: here.adapter.delete([b"a"], soon),
    }
    if what in batches:
        (outcome,) = ends(batches[what])
        assert outcome.result is Result.FAILED
        assert outcome.retryable
    elif what == "exists":
        assert ends(lambda: _failed(lambda: here.adapter.exists([b"a"], soon)))
    else:
        assert ends(lambda: _failed(lambda: here.adapter.scan(None, soon)))


def _failed(call: Callable[[], object]) -> bool:
    try:
        call()
    except TierError as error:
        return error.retryable
    return False


@TRANSPORTS
@pytest.mark.parametrize("what", ["load", "scan"])
def test_a_host_of_silent_addresses_is_left_by_the_deadline(
    tier: Make, transport: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with silent_addresses(120, monkeypatch) as (host, port):
        here = tier(settings(f"http://{host}:{port}", transport=transport))
        soon = time.monotonic() + 1.0
        if what == "scan":
            assert ends(lambda: _failed(lambda: here.adapter.scan(None, soon)))
            return
        (outcome,) = ends(lambda: here.adapter.load([LoadItem(b"a", [memoryview(bytearray(10))])], soon))
        assert outcome.result is Result.FAILED
        assert outcome.retryable


# --- lookups ---------------------------------------------------------------------------------------------------


@TRANSPORTS
def test_a_lookup_that_is_throttled_costs_one_request(bucket: Bucket, front: Front, tier: Make, transport: str) -> None:
    here = tier(bucket.settings(endpoint_url=front.url, transport=transport))
    here.store(b"key", b"content")
    for status, code in ((503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests")):
        front.rule = lambda seen, status=status, code=code: Fault(status=status, code=code)
        before = len(front.seen)
        with pytest.raises(TierError) as error:
            here.exists(b"key")
        assert error.value.retryable
        assert len(front.seen) - before == 1


# --- listings --------------------------------------------------------------------------------------------------


def page(names: list[str], token: str = "", truncated: bool = True) -> bytes:
    found = "".join(
        f"<Contents><Key>{name}</Key><Size>5</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for name in names
    )
    more = f"<IsTruncated>{str(truncated).lower()}</IsTruncated>"
    following = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return f"<?xml version='1.0'?><ListBucketResult>{more}{following}{found}</ListBucketResult>".encode()


SESSION = (
    b"<?xml version='1.0'?><CreateSessionResult><Credentials><SessionToken>T</SessionToken><SecretAccessKey>S"
    b"</SecretAccessKey><AccessKeyId>K</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>"
    b"</CreateSessionResult>"
)


def names_of(*keys: bytes) -> list[str]:
    return [f"lmcache/{key.hex()}" for key in keys]


def listed(here: Any) -> list[bytes]:
    """All keys of a scan."""
    found: list[ScanEntry] = []
    cursor = None
    while True:
        one = here.adapter.scan(cursor, here.deadline)
        found += one.entries
        cursor = one.cursor
        if cursor is None:
            return [entry.key for entry in found]


def lister(pages: Callable[[dict[str, str]], bytes], asked: list[dict[str, str]]) -> Callable[[Talk], None]:
    def script(talk: Talk) -> None:
        while request := talk.request():
            if "session" in request.query:  # of a directory bucket
                talk.send(answer(200, SESSION, "Content-Type: application/xml"))
                continue
            asked.append(request.query)
            talk.send(answer(200, pages(request.query), "Content-Type: application/xml"))

    return script


BUCKETS = pytest.mark.parametrize("bucket_name", ["bucket", "bucket--use1-az4--x-s3"])


@BUCKETS
def test_a_scan_pages_by_the_services_token_over_empty_pages(serve: Serve, tier: Make, bucket_name: str) -> None:
    """As services give them that filter what they list."""
    pages = {
        "": page([], "one"),
        "one": page(names_of(b"a", b"b"), "two"),
        "two": page([], "three"),
        "three": page([], "four"),
        "four": page(names_of(b"c"), truncated=False),
    }
    asked: list[dict[str, str]] = []
    server = serve(lister(lambda query: pages[query.get("continuation-token", "")], asked))
    here = tier(settings(server, bucket=bucket_name, **_plain_if_directory(bucket_name)))
    assert ends(lambda: listed(here)) == [b"a", b"b", b"c"]
    assert not any("start-after" in query for query in asked), "a directory bucket knows none"


def _plain_if_directory(bucket_name: str) -> dict[str, object]:
    """Directory buckets have sessions of their own, which are boto3's affair."""
    return {"transport": "plain"} if bucket_name.endswith("--x-s3") else {}


@BUCKETS
def test_a_scan_ends_when_a_page_repeats(serve: Serve, tier: Make, bucket_name: str) -> None:
    """A service that does not know tokens gives its first page again and again."""
    asked: list[dict[str, str]] = []
    server = serve(lister(lambda query: page(names_of(b"a", b"b"), f"token-{len(asked)}"), asked))
    here = tier(settings(server, bucket=bucket_name, **_plain_if_directory(bucket_name)))
    assert ends(lambda: listed(here)) == [b"a", b"b"]
    assert len(asked) == 2


@BUCKETS
def test_a_scan_ends_when_its_pages_go_round(serve: Serve, tier: Make, bucket_name: str) -> None:
    pages = {"": page(names_of(b"a"), "one"), "one": page(names_of(b"b"), "two"), "two": page(names_of(b"a"), "one")}
    server = serve(lister(lambda query: pages[query.get("continuation-token", "")], []))
    here = tier(settings(server, bucket=bucket_name, **_plain_if_directory(bucket_name)))
    assert ends(lambda: listed(here)) == [b"a", b"b"]


def test_a_scan_ends_when_an_empty_page_leads_to_itself(serve: Serve, tier: Make) -> None:
    server = serve(lister(lambda query: page([], "again"), []))
    assert ends(lambda: listed(tier(settings(server)))) == []


def test_a_service_without_tokens_is_asked_for_what_comes_after_the_last_name(serve: Serve, tier: Make) -> None:
    asked: list[dict[str, str]] = []

    def pages(query: dict[str, str]) -> bytes:
        return page(names_of(b"b"), truncated=False) if "start-after" in query else page(names_of(b"a"))

    assert ends(lambda: listed(tier(settings(serve(lister(pages, asked)))))) == [b"a", b"b"]
    assert asked[1]["start-after"] == names_of(b"a")[0]


def test_a_part_without_a_way_to_the_rest_is_an_error_and_not_the_whole(serve: Serve, tier: Make) -> None:
    with pytest.raises(TierError, match="no token"):
        ends(lambda: listed(tier(settings(serve(lister(lambda query: page([]), []))))))


def test_a_token_that_has_become_too_old_is_replaced_by_the_last_name(serve: Serve, tier: Make) -> None:
    def script(talk: Talk) -> None:
        while request := talk.request():
            if "continuation-token" in request.query:
                talk.send(answer(400, b"<Error><Code>InvalidArgument</Code></Error>"))
            elif "start-after" in request.query:
                talk.send(answer(200, page(names_of(b"b"), truncated=False)))
            else:
                talk.send(answer(200, page(names_of(b"a"), "old")))

    assert ends(lambda: listed(tier(settings(serve(script))))) == [b"a", b"b"]


@pytest.mark.parametrize("text", ["", "1", "lmcache/61", '{"token": 1', '{"place": "a"}', "[]"])
def test_a_foreign_cursor_is_refused_with_a_message(serve: Serve, tier: Make, text: str) -> None:
    here = tier(settings(serve(lambda talk: None)))
    with pytest.raises(TierError, match="not a cursor"):
        here.adapter.scan(text, here.deadline)


def test_a_listing_that_cannot_be_read_is_an_error(serve: Serve, tier: Make) -> None:
    here = tier(settings(serve(lister(lambda query: b"<ListBucketResult><Contents>", []))))
    with pytest.raises(TierError, match="cannot scan"):
        here.adapter.scan(None, here.deadline)
