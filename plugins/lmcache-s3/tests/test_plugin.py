"""The package as a plugin: settings, entry point, check."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import entry_points
from typing import Any

import pytest
from pydantic import ValidationError

from lmcache_core.errors import TierError
from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.contract import AdapterContext
from lmcache_s3.adapter import S3Adapter
from lmcache_s3.settings import S3Settings

from .conftest import Bucket


def test_the_entry_point_names_the_plugin_and_loads_nothing_heavy() -> None:
    (entry,) = entry_points(group="lmcache_core", name="s3")
    assert entry.value == "lmcache_s3"
    heavy = "('boto3', 'botocore', 'pydantic', 'torch', 'zmq', 'lmcache_s3.adapter')"
    probe = f"import sys, lmcache_s3; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bukket": "x"}, "bukket"),
        ({"bucket": "a/b/c"}, "prefix"),
        ({"prefix": "a/../b"}, "prefix"),
        ({"prefix": "a b"}, "prefix"),
        ({"endpoint_url": "localhost:9000"}, "http://HOST"),
        ({"endpoint_url": "http://me:secret@host"}, "password"),
        ({"endpoint_url": "http://[::1:9000"}, "http://HOST"),
        ({"endpoint_url": "http://localhost:99999"}, "http://HOST"),
        ({"bucket": "kept", "endpoint_url": "https://kept.s3.eu-west-1.amazonaws.com"}, "as https://s3.eu-west-1"),
        ({"bucket": "kept", "endpoint_url": "http://[::1]:9000/kept/"}, "contains the bucket's name"),
        ({"access_key_id": "AK"}, "both, or neither"),
        ({"kms_key_id": "k"}, "server_side_encryption"),
        ({"profile": "p", "access_key_id": "a", "secret_access_key": "b"}, "not both"),
    ],
)
def test_settings_refuse_what_cannot_be_meant(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        S3Settings(**{"bucket": "bucket", **given})


def test_check_says_what_is_well_and_what_to_do(bucket: Bucket, closed_port: int) -> None:
    def checked(settings: S3Settings) -> list[Finding]:
        with S3Adapter(settings, AdapterContext(tier="cold")) as adapter:
            return list(adapter.check(time.monotonic() + 60))

    good = checked(bucket.settings())
    assert all(finding.ok for finding in good), good
    assert any("stored, loaded and deleted" in finding.message for finding in good)
    assert bucket.names() == [], "the probe is deleted again"
    for settings in (
        bucket.settings(bucket="not-there-at-all"),
        bucket.settings(endpoint_url=f"http://127.0.0.1:{closed_port}"),
    ):
        with pytest.raises(TierError) as raised:
            checked(settings)
        assert raised.value.cure
