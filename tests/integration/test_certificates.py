"""A tier that demands a certificate of its lossy serdes, and what is said of a lossy tier's objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.cli.main import main
from lmcache_core.cli.status import summary
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.observe.troubles import with_troubles
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S, until

pytest.importorskip("lmcache_fs")
pytest.importorskip("lmcache_compress")
pytest.importorskip("lmcache_quant._native", reason="built without C")

LAYOUT = Layout("bfloat16", (2, 64, 2, 16), "KTHD")
OURS = Namespace("small", LAYOUT, "0123456789abcdef")
OTHERS = Namespace("large", LAYOUT, "fedcba9876543210")
KEY = bytes(range(32))


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    measured = {"mean": 0.002, "deviation": 0.0}, {"mean": 0.97, "deviation": 0.0}
    chain = dict(zip(("divergence", "agreement"), measured, strict=True))
    whole = {
        "format": 1,
        "model": "small",
        "weights": "0123456789abcdef",
        "dtype": "bfloat16",
        "chains": [chain | {"lossy": [["int8", {"format": 1, "group_tokens": 64}]]}],
    }
    path = tmp_path / "int8.json"
    path.write_text(json.dumps(whole))
    return path


@pytest.fixture
def serve(start: Callable[..., Server], tmp_path: Path) -> Callable[..., Server]:
    def serve(**settings: Any) -> Server:
        tier = {"type": "fs", "path": str(tmp_path / "disk"), **settings}
        return start(l1={"size_bytes": 1 << 20, "backing": "memfd"}, l2={"disk": tier})

    return serve


def test_a_server_does_not_start_without_the_certificate_that_is_demanded(
    serve: Callable[..., Server], certificate: Path, tmp_path: Path
) -> None:
    for serde, file, why in (
        (["int8"], tmp_path / "none.json", "cannot be read"),
        (["int4"], certificate, "certifies"),
        ([{"type": "int8", "group_tokens": 32}], certificate, "certifies"),
    ):
        with pytest.raises(SettingsError, match=why) as caught:
            serve(serde=serde, require_certificate=str(file))
        assert "lmcache-core quality" in str(caught.value)
    with pytest.raises(SettingsError, match="agreement_min"):
        serve(serde=["int8"], require_certificate=str(certificate), agreement_min=0.99)


def test_check_says_so_before_the_server_starts(
    certificate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = ["--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "disk"), "--runtime_dir", str(tmp_path)]
    for serde, accepted in (("int8", True), ("int4", False)):
        main(["check", "--json", *disk, "--l2.disk.serde", serde, "--l2.disk.require_certificate", str(certificate)])
        findings = json.loads(capsys.readouterr().out)["findings"]
        refused = [each for each in findings if "certifies" in each["message"]]
        assert [each["ok"] for each in refused] == [False] * (not accepted)


def test_a_lossless_tier_needs_no_certificate(serve: Callable[..., Server], tmp_path: Path) -> None:
    with serve(serde=["planes"], require_certificate=str(tmp_path / "none.json")).connect() as client:
        assert client.status()["tiers"]["tiers"][0]["lossy"] == []
        assert not [text for _, text in summary(with_troubles(client.status())) if "lossy" in text]


def test_the_certificates_model_is_served_and_another_is_refused_with_the_cure(
    serve: Callable[..., Server], certificate: Path
) -> None:
    with serve(serde=["int8", "zstd"], require_certificate=str(certificate)).connect() as client:
        client.register_layout(OURS)
        with pytest.raises(UsageError, match=r"for the model small.*l2\.disk\.require_certificate"):
            client.register_layout(OTHERS)
        assert "for the model small" in client.status()["namespaces_refused"][OTHERS.public_label]
        assert client.status()["tiers"]["tiers"][0]["certified_for"] == "small"


def test_a_certificate_cannot_be_demanded_of_a_tier_while_another_model_uses_it(
    serve: Callable[..., Server], certificate: Path
) -> None:
    with serve(serde=["int8"]).connect() as client:
        client.register_layout(OTHERS)
        with pytest.raises(UsageError, match="for the model small"):
            client.tiers_reconfigure("disk", {"require_certificate": str(certificate)})


def test_what_another_model_left_in_the_pool_is_not_stored_under_the_certificate(
    start: Callable[..., Server], certificate: Path, tmp_path: Path
) -> None:
    server = start(l1={"size_bytes": 1 << 20, "backing": "memfd"})
    content = [memoryview(bytes(LAYOUT.nbytes)).cast("H")]
    for namespace in (OTHERS, OURS):
        with server.connect() as client:
            assert client.store([KEY], content, namespace=namespace).stored == 1
    tier = {"type": "fs", "path": str(tmp_path / "disk"), "serde": ["int8"], "require_certificate": str(certificate)}
    with server.connect() as client:
        client.register_layout(OURS)
        client.tiers_add("disk", tier)
        assert client.wait_stored([KEY], namespace=OURS, timeout_s=WAIT_S)[0].stored
        until(lambda: not any(client.status()["tiers"]["stores"]["dirty"].values()), "what is owed")
        assert client.status()["tiers"]["tiers"][0]["objects"] == 1


def test_status_and_explain_say_that_an_object_is_lossy(serve: Callable[..., Server]) -> None:
    with serve(serde=["int8", "zstd"]).connect() as client:
        client.store([KEY], [memoryview(bytes(LAYOUT.nbytes)).cast("H")], namespace=OURS)
        client.wait_stored([KEY], namespace=OURS)
        (explanation,) = client.explain([KEY], namespace=OURS)
        assert explanation.where == ("l1", "disk")
        assert explanation.why == "there: l1, disk (lossy: int8)"
        assert client.status()["tiers"]["tiers"][0]["lossy"] == ["int8"]
        shown = next(text for name, text in summary(with_troubles(client.status())) if name == "tier")
        assert shown.endswith("1 objects; lossy: int8")
