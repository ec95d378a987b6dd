"""What only S3 does: refused credentials, missing buckets, wrong clocks, requests to slow down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from matrix_world import KEYS, World, until
from s3_calls import build, load, store

from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.tiers.contract import Result
from lmcache_core.tiers.tier.parallel import adapter_context

if TYPE_CHECKING:
    from types import ModuleType

    from services.moto import S3Service

Make = Callable[..., World]
S3 = ("s3-moto", "s3-radosgw")


@pytest.fixture(autouse=True)
def _only_s3(service: S3Service) -> None:
    if service.name not in S3 or not service.ours:
        pytest.skip("these tests are for an S3 service of ours")


@pytest.mark.parametrize("transport", ["direct", "plain"])
def test_a_missing_bucket_is_said_with_the_cure_and_used_once_it_is_there(
    service: S3Service, label: str, transport: str
) -> None:
    bucket = f"late-{label[-8:]}-{transport}"
    with build(service, bucket=bucket, transport=transport) as adapter:
        refused = store(adapter, b"key")
        assert refused.result is Result.FAILED
        assert "NoSuchBucket" in refused.error
        assert "create the bucket" in refused.error
        with pytest.raises(Exception, match="create the bucket"):
            adapter.exists([b"key"], time.monotonic() + 30)
        service.boto().create_bucket(Bucket=bucket)
        assert store(adapter, b"key").result is Result.DONE
        loaded, content = load(adapter, b"key", 7000)
        assert (loaded.result, loaded.nbytes, content) == (Result.DONE, 7000, b"content" * 1000)


def test_a_wrong_secret_is_said_with_the_cure(service: S3Service) -> None:
    if service.name != "s3-radosgw":
        pytest.skip("moto checks no signature")
    for transport in ("direct", "plain"):
        wrong = "wrong-secret-that-nobody-may-see"
        with build(service, secret_access_key=wrong, transport=transport) as adapter:
            refused = store(adapter, b"key")
            assert refused.result is Result.FAILED
            assert "SignatureDoesNotMatch" in refused.error
            assert "its secret is wrong" in refused.error
            with pytest.raises(Exception, match="its secret is wrong"):
                adapter.exists([b"key"], time.monotonic() + 30)
            assert wrong not in refused.error + repr(adapter) + repr(vars(adapter))


def test_credentials_that_are_mended_in_their_file_are_used_without_a_restart(
    service: S3Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    if service.name != "s3-radosgw":
        pytest.skip("moto checks no signature")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(secret: str) -> None:
        file.write_text(f"[default]\naws_access_key_id={service.access_key}\naws_secret_access_key={secret}\n")

    write("a-wrong-one")
    given = {key: value for key, value in service.adapter_settings().items() if "access_key" not in key}
    adapter = load_plugins().build(Kind.L2_ADAPTER, "s3", given, adapter_context("cold", 4))
    with adapter:
        assert store(adapter, label.encode()[-40:]).result is Result.FAILED
        write(service.secret_key)
        until(lambda: store(adapter, label.encode()[-40:]).result is Result.DONE, "the new credentials")


@pytest.mark.parametrize(
    ("status", "code", "cure"),
    [
        (400, "ExpiredToken", "renew them"),
        (403, "RequestTimeTooSkewed", "correct the clock"),
        (403, "AccessDenied", "allow s3:GetObject"),
        (503, "SlowDown", "is throttling"),
        (301, "PermanentRedirect", "set l2."),
    ],
)
def test_a_refusing_service_is_reported_with_its_cure_and_used_again(
    world: Make, service: S3Service, front: Any, front_module: ModuleType, status: int, code: str, cure: str
) -> None:
    here = world({**service.adapter_settings(), "endpoint_url": front.url})
    numbers = here.stored_and_forgotten(0)
    front.rule = lambda seen: front_module.Fault(status=status, code=code)
    assert here.read(numbers, wait_s=2.0) == 0
    here.store(KEYS)
    # The answer to a lookup's HEAD has no words; that to the store's PUT names the code.
    until(lambda: all(each in json.dumps(here.tier) for each in (cure, code)), f"{cure!r} and {code} in the status")
    front.rule = None
    here.recover(2 * KEYS)
    here.account()


def test_a_clock_that_is_wrong_is_refused_by_the_gateway_and_said(
    service: S3Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    if service.name != "s3-radosgw":
        pytest.skip("moto checks no signature")
    import datetime

    import botocore.auth

    def an_hour_ago(remove_tzinfo: bool = True) -> datetime.datetime:
        now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
        return now.replace(tzinfo=None) if remove_tzinfo else now

    monkeypatch.setattr(botocore.auth, "get_current_datetime", an_hour_ago)
    with build(service, transport="direct") as adapter:
        refused = store(adapter, b"key")
        assert refused.result is Result.FAILED
        assert "RequestTimeTooSkewed" in refused.error
        assert "correct the clock" in refused.error
        monkeypatch.undo()
        assert store(adapter, b"key").result is Result.DONE
