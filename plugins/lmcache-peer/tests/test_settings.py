"""Settings that do not fit together are refused with what to do; the example and the check run as the docs say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lmcache_core.errors import SettingsError
from lmcache_peer.admission import Admission
from lmcache_peer.check import check
from lmcache_peer.directory import FixedNodes, NodeEntry, redis_settings
from lmcache_peer.messages import VERSION
from lmcache_peer.settings import ClusterSettings, PeerTierSettings, ServingSettings

from .conftest import free_port

EXAMPLE = Path(__file__).parents[3] / "examples" / "two_nodes_by_peer.py"
TLS = {"tls_ca_file": "/x/ca.pem", "tls_cert_file": "/x/node.pem", "tls_key_file": "/x/node.key"}
NODES = {"nodes": "10.0.0.2:7600"}


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (PeerTierSettings, {}, "set redis_url"),
        (PeerTierSettings, {"nodes": "node-b"}, "HOST:PORT"),
        (PeerTierSettings, NODES | {"redis_url": "redis://a"}, "leave nodes out"),
        (PeerTierSettings, {"redis_url": "redis://user:hidden@a"}, "redis_url_file"),
        (PeerTierSettings, {"redis_url": "redis://a", "redis_url_file": "/x/f"}, "keep one"),
        (PeerTierSettings, {"redis_mode": "sentinel", "redis_url": "redis://a"}, "Sentinels"),
        (PeerTierSettings, NODES | {"tls_ca_file": "/x/ca.pem"}, "TLS needs all three"),
        (PeerTierSettings, NODES | {"plaintext": "trusted_network"}, "takes a secret"),
        (PeerTierSettings, NODES | {"patience_s": 0}, "patience_s"),
        (ServingSettings, {"host": "10.0.0.1"}, "no TLS"),
        (ServingSettings, {"host": "0.0.0.0", "redis_url": "redis://a", **TLS}, "set advertise"),
        (ServingSettings, {"advertise": "10.0.0.1"}, "HOST:PORT"),
        (ServingSettings, {"cluster": "a b"}, "cluster"),
        (ServingSettings, {"locked_share": 0.9}, "locked_share"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_cure(
    model: type[ClusterSettings], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words) as refused:
        model.model_validate(given)
    assert "hidden" not in str(refused.value), "a password never stands in an error"


def test_plaintext_goes_only_where_the_settings_allow() -> None:
    from lmcache_core.protocol.hostport import HostPort

    near, far = HostPort("127.0.0.1", 1), HostPort("10.0.0.2", 1)
    plain = PeerTierSettings.model_validate(NODES)
    words = PeerTierSettings.model_validate(NODES | {"plaintext": "trusted_network", "secret_file": "/x/s"})
    tls = PeerTierSettings.model_validate(NODES | TLS)
    assert [each.may_reach(near) for each in (plain, words, tls)] == [True] * 3
    assert [each.may_reach(far) for each in (plain, words, tls)] == [False, True, True]


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [(None, 0, "cannot read"), ("short", 0o600, "16"), ("x" * 40, 0o644, "chmod 600")],
)
def test_a_secret_that_protects_nothing_is_refused(tmp_path: Path, content: str | None, mode: int, words: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(SettingsError, match=words):
        Admission(PeerTierSettings.model_validate(NODES | {"secret_file": str(path)}))


def test_certificates_that_cannot_be_read_are_named() -> None:
    with pytest.raises(SettingsError, match=r"node\.pem"):
        Admission(PeerTierSettings.model_validate(NODES | TLS))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_file_with_the_url_may_have_a_byte_order_mark(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "url").write_bytes(mark + b"redis://user:password@127.0.0.1:1/3\r\n")
    settings = redis_settings(PeerTierSettings(redis_url_file=str(tmp_path / "url")))
    assert settings.url is not None
    assert settings.url.get_secret_value() == "redis://user:password@127.0.0.1:1/3"


@pytest.mark.parametrize(
    "content", [b"", b"hunter2", b"\xff\xfehunter2", b"\x80hunter2", b"redis://u:hunter2@h:99999/x"]
)
def test_a_url_that_cannot_be_used_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "url").write_bytes(content)
    serving = ServingSettings.model_validate({"port": 0, "redis_url_file": str(tmp_path / "url")})
    findings = [each for each in check(serving, "default") if not each.ok]
    assert findings
    assert "redis_url_file" in findings[0].message
    assert "hunter2" not in str(findings)


def test_the_check_sees_its_own_entry_at_an_address_of_ipv6() -> None:
    serving = ServingSettings.model_validate({"host": "::1", "port": 7600, "node": "a"})
    directory = FixedNodes(())
    directory.entries = lambda: [NodeEntry("a", 1, "[::1]:7600", VERSION)]  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmcache_peer.check.directory_of", lambda *_: directory)
        assert "node a of cluster" in check(serving, "default")[-1].message


def test_the_check_finds_a_taken_port_and_a_directory_that_is_away() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        findings = check(ServingSettings.model_validate({"port": port, "node": "a"}), "default")
        assert not findings[0].ok
        url = f"redis://127.0.0.1:{free_port()}"
        findings = check(ServingSettings.model_validate({"port": 0, "redis_url": url}), "default")
        assert any(not each.ok and "directory" in each.message for each in findings)
    findings = check(ServingSettings.model_validate({"port": free_port(), "node": "a"}), "default")
    assert all(each.ok for each in findings)
    assert "node a of cluster 'default'" in findings[-1].message


def test_the_example_runs_as_its_text_says() -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "loaded 16" in ran.stdout
    assert ran.stdout.endswith("every byte is the same\n")
