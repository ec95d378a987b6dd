"""What the adapter adds to the contract: conditions, ranges, throttling, broken connections, secrets."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest
from s3_front import Fault, Seen

from lmcache_core.errors import TierError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.tiers.contract import LoadItem, Result, StoreItem
from lmcache_core.tiers.object.format import HEADER_BYTES, build_header, object_kind, payload_checksum, tier_key

from .conftest import Bucket, Tier
from .s3_front import Front

Make = Callable[..., Tier]
TRANSPORTS = pytest.mark.parametrize("transport", ["direct", "plain"])


def kernel_object(number: int, nbytes: int, dtype: str = "uint8") -> tuple[bytes, bytes, bytes]:
    """Tier key, header page and payload of an object as the kernel makes it; the payload is of each call's own."""
    payload = os.urandom(nbytes)
    page = memoryview(bytearray(HEADER_BYTES))
    key = number.to_bytes(32, "big")
    kind = object_kind(Layout(dtype, (nbytes,)), CodecChain())
    build_header(page, kind, key=key, namespace=7, epoch=0, encoded_bytes=nbytes, checksum=payload_checksum([payload]))
    return tier_key(key, 7, 0), bytes(page), payload


@TRANSPORTS
@pytest.mark.parametrize("nbytes", [10_000, 1 << 20], ids=["small", "large"])
def test_a_second_writer_does_not_upload_what_is_there(
    bucket: Bucket, front: Front, tier: Make, transport: str, nbytes: int
) -> None:
    one = tier(bucket.settings(endpoint_url=front.url, transport=transport))
    other = tier(bucket.settings(endpoint_url=front.url, transport=transport))
    key, page, payload = kernel_object(1, nbytes)
    assert one.store(key, page, payload).result is Result.DONE
    before = len(front.seen)
    _, page_again, payload_again = kernel_object(1, nbytes)  # the same chunk, with other last bits
    assert other.store(key, page_again, payload_again).result is Result.DONE
    if nbytes >= 1 << 20:
        assert sum(seen.nbytes for seen in front.seen[before:]) == 0, "the payload was sent again"
    assert other.load(key, HEADER_BYTES, nbytes)[1] == page + payload, "the first one stays"


def test_a_damaged_object_that_may_not_be_deleted_is_stored_over(bucket: Bucket, front: Front, tier: Make) -> None:
    def forbid(seen: Seen) -> Fault | None:
        deletes = seen.method == "DELETE" or (seen.method == "POST" and "delete" in seen.path)
        return Fault(status=403, code="AccessDenied") if deletes else None

    front.rule = forbid
    here = tier(bucket.settings(endpoint_url=front.url))
    key, page, payload = kernel_object(1, 10_000)
    assert here.store(key, page, payload).result is Result.DONE
    (outcome,) = here.adapter.set_aside([key], here.deadline)
    assert outcome.result is Result.FAILED
    _, page_again, payload_again = kernel_object(1, 10_000)
    item = StoreItem(key, [memoryview(page_again), memoryview(payload_again)], replaces=True)
    assert here.adapter.store([item], here.deadline)[0].result is Result.DONE
    assert here.load(key, HEADER_BYTES, 10_000)[1] == page_again + payload_again
    assert here.store(key, page, payload).result is Result.DONE
    assert here.load(key, HEADER_BYTES, 10_000)[1] == page_again + payload_again, "sound again, and not sent twice"


def test_an_object_of_another_layout_is_replaced(bucket: Bucket, tier: Make) -> None:
    here = tier(bucket.settings())
    for nbytes in (10_000, 1 << 20):
        key, page, payload = kernel_object(nbytes, nbytes)
        here.store(key, page, payload)
        _, other_page, other_payload = kernel_object(nbytes, nbytes, "int8")
        assert here.store(key, other_page, other_payload).result is Result.DONE
        assert here.load(key, HEADER_BYTES, nbytes)[1] == other_page + other_payload


def test_a_service_without_conditions_is_remembered(bucket: Bucket, front: Front, tier: Make) -> None:
    def refuse(seen: Seen) -> Fault | None:
        return Fault(status=501, code="NotImplemented") if "if-none-match" in seen.headers else None

    front.rule = refuse
    here = tier(bucket.settings(endpoint_url=front.url))
    for number in range(3):
        key, page, payload = kernel_object(number, 5000)
        assert here.store(key, page, payload).result is Result.DONE
    assert sum("if-none-match" in seen.headers for seen in front.seen) == 1, "refused once, and never sent again"


@TRANSPORTS
def test_a_large_object_comes_in_ranges_side_by_side(bucket: Bucket, front: Front, tier: Make, transport: str) -> None:
    here = tier(bucket.settings(endpoint_url=front.url, transport=transport, range_bytes=1 << 20))
    payload = os.urandom(5_000_001)
    here.store(b"key", payload)
    outcome, found = here.load(b"key", 4096, 5_000_001 - 4096)
    assert (outcome.result, outcome.nbytes, found) == (Result.DONE, len(payload), payload)
    assert sum("range" in seen.headers for seen in front.seen) == 4
    outcome, found = here.load(b"key", 8_000_000)  # the buffers may be larger than the object
    assert (outcome.result, outcome.nbytes) == (Result.DONE, len(payload))
    assert found[: len(payload)] == payload
    assert here.load(b"key", 4_999_999)[0].result is Result.DAMAGED
    assert here.load(b"absent", 8_000_000)[0].result is Result.MISS


def test_throttling_lowers_the_number_of_requests_and_recovers(bucket: Bucket, front: Front, tier: Make) -> None:
    here = tier(bucket.settings(endpoint_url=front.url))
    gate = here.adapter.client.gate
    here.store(b"key", b"content")
    front.rule = lambda seen: Fault(status=503, code="SlowDown")
    outcome = here.store(b"other", b"content")
    assert outcome.result is Result.THROTTLED
    assert gate.limit == 2
    with pytest.raises(TierError, match="is throttling") as error:
        here.exists(b"key")
    assert error.value.retryable
    front.rule = None
    for _ in range(40):
        here.load(b"key", 100)
    assert gate.limit == 4


@TRANSPORTS
@pytest.mark.parametrize("fault", [Fault(keep=0.5), Fault(reset=True)], ids=["truncated", "reset"])
def test_a_broken_answer_is_a_failure_and_never_an_object(
    bucket: Bucket, front: Front, tier: Make, transport: str, fault: Fault
) -> None:
    here = tier(bucket.settings(endpoint_url=front.url, transport=transport))
    here.store(b"key", b"content" * 10_000)
    front.rule = lambda seen: fault if seen.method == "GET" else None
    outcome, _ = here.load(b"key", 70_000)
    assert outcome.result is Result.FAILED
    assert outcome.retryable
    assert outcome.error
    front.rule = None
    assert here.load(b"key", 70_000)[1] == b"content" * 10_000


def test_connections_are_kept_and_a_server_that_closed_them_costs_nothing(
    bucket: Bucket, front: Front, tier: Make
) -> None:
    here = tier(bucket.settings(endpoint_url=front.url, transport="direct"))
    here.store(b"key", b"content")
    made = front.connections
    here.load(b"key", 100)
    assert front.connections == made, "one connection served both"
    fault = iter([Fault(reset=True)])
    front.rule = lambda seen: next(fault, None)  # as a server that closes an idle connection just now
    assert here.load(b"key", 100)[0].result is Result.DONE
    assert front.connections == made + 1


def test_plain_takes_over_when_the_signer_has_changed(
    bucket: Bucket, tier: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lmcache_s3.transport.direct._Signer.add_auth", lambda self, request: None)
    here = tier(bucket.settings())
    with caplog.at_level(logging.WARNING):
        assert here.store(b"key", b"content").result is Result.DONE
    assert here.adapter.client.transport == "plain"
    assert "which copy" in caplog.text
    strict = tier(bucket.settings(transport="direct"))
    assert 'transport = "auto"' in strict.store(b"key", b"content").error


def test_encryption_and_storage_class_reach_the_service(bucket: Bucket, tier: Make) -> None:
    for transport in ("direct", "plain"):
        settings = bucket.settings(
            transport=transport, server_side_encryption="AES256", storage_class="STANDARD_IA", prefix=transport
        )
        assert tier(settings).store(b"key", b"content").result is Result.DONE
        about = bucket.boto.head_object(Bucket=bucket.name, Key=f"{transport}/{b'key'.hex()}")
        assert (about["ServerSideEncryption"], about["StorageClass"]) == ("AES256", "STANDARD_IA")


def test_an_empty_prefix_and_foreign_objects(bucket: Bucket, tier: Make) -> None:
    here = tier(bucket.settings(prefix=""))
    bucket.boto.put_object(Bucket=bucket.name, Key="README", Body=b"not ours")
    here.store(b"key", b"content")
    page = here.adapter.scan(None, here.deadline)
    assert [(entry.key, entry.nbytes) for entry in page.entries] == [(b"key", 7)]


def test_a_proxy_is_gone_through(bucket: Bucket, front: Front, tier: Make) -> None:
    """The front forwards absolute URLs as a proxy does; the endpoint itself is nobody's."""
    settings = bucket.settings(proxy=front.url, transport="direct", endpoint_url="http://nobody.invalid:9")
    here = tier(settings)
    here.store(b"key", b"content")
    assert front.seen
    assert all(seen.path.startswith("http://nobody.invalid:9/") for seen in front.seen)


def test_no_secret_is_in_any_word(
    bucket: Bucket, closed_port: int, tier: Make, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "a-secret-that-nobody-may-see"
    with caplog.at_level(logging.DEBUG, logger="lmcache_s3"):
        for more in ({}, {"bucket": "not-there-at-all"}, {"endpoint_url": f"http://127.0.0.1:{closed_port}"}):
            for transport in ("direct", "plain"):
                settings = bucket.settings(
                    secret_access_key=secret, session_token=secret, proxy=None, transport=transport, **more
                )
                here = tier(settings)
                words = [str(here.store(b"key", b"x")), str(here.load(b"key", 10)[0]), repr(settings), str(settings)]
                words += [settings.model_dump_json(), repr(here.adapter), repr(vars(here.adapter)), caplog.text]
                assert not [word for word in words if secret in word]


# --- deletes need proof -------------------------------------------------------------------------------------
def test_an_object_that_another_node_replaced_is_not_set_aside(bucket: Bucket, tier: Make) -> None:
    here, there = tier(bucket.settings()), tier(bucket.settings(skip_existing=False))
    key, page, payload = kernel_object(1, 10_000)
    here.store(key, page, payload)
    (seen, _) = here.load(key, HEADER_BYTES, 10_000)
    assert seen.version
    _, page_again, payload_again = kernel_object(1, 10_000)
    there.store(key, page_again, payload_again)
    assert here.adapter.set_aside([key], here.deadline, [seen.version])[0].result is Result.DONE
    assert here.load(key, HEADER_BYTES, 10_000)[1] == page_again + payload_again


def test_a_header_is_read_without_its_object(bucket: Bucket, front: Front, tier: Make) -> None:
    ranges: list[str] = []

    def note(seen: Seen) -> None:
        if seen.method == "GET" and seen.headers.get("range"):
            ranges.append(seen.headers["range"])

    front.rule = note
    here = tier(bucket.settings(endpoint_url=front.url))
    key, page, payload = kernel_object(1, 1 << 20)
    here.store(key, page, payload)
    into = bytearray(HEADER_BYTES)
    items = [LoadItem(key, [memoryview(into)]), LoadItem(b"nobody", [memoryview(bytearray(HEADER_BYTES))])]
    outcomes = here.adapter.load_headers(items, here.deadline)
    assert [each.result for each in outcomes] == [Result.DONE, Result.MISS]
    assert bytes(into) == bytes(page)
    assert set(ranges) == {f"bytes=0-{HEADER_BYTES - 1}"}


def test_a_bucket_that_keeps_versions_is_said_to(bucket: Bucket, tier: Make, caplog: pytest.LogCaptureFixture) -> None:
    bucket.boto.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"})
    here = tier(bucket.settings())
    for number in range(2):
        here.store(*kernel_object(number, 100))
    assert [record.message for record in caplog.records if "lifecycle rule" in record.message][1:] == []
    assert here.adapter.versioned
    findings = list(here.adapter.check(here.deadline))
    assert any(not each.ok and "lifecycle rule" in each.cure for each in findings), findings
