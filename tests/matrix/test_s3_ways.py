"""Ways to an S3 service, and to credentials for it: TLS, proxies, profiles, web identity, keys that change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from matrix_world import until
from s3_calls import build, load, store

from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.tiers.contract import L2Adapter, Result
from lmcache_core.tiers.tier.parallel import adapter_context

if TYPE_CHECKING:
    from services.certificates import Certificates
    from services.forwarders import ConnectProxy, TlsFront
    from services.moto import S3Service

S3 = ("s3-moto", "s3-radosgw")
CONTENT = b"content" * 1000
PROXY_USER, PROXY_PASSWORD = "proxy-user", "proxy/password@that:nobody may see"
BOTH = pytest.mark.parametrize("transport", ["direct", "plain"])
pytestmark = [pytest.mark.backends(*S3)]


@pytest.fixture(autouse=True)
def _a_clean_environment(service: S3Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the user's own way to AWS."""
    if not service.ours:
        pytest.skip("these tests stand things in front of the service: not with one of your own")
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_CA_BUNDLE", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    from services.certificates import Certificates

    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls(service: S3Service, certificates: Certificates) -> Iterator[TlsFront]:
    """TLS in front of the service."""
    from services.forwarders import TlsFront

    front = TlsFront(service.proxied(), certificates)
    yield front
    front.stop()


@pytest.fixture
def connect_proxy() -> Iterator[ConnectProxy]:
    from services.forwarders import ConnectProxy

    proxy = ConnectProxy(PROXY_USER, PROXY_PASSWORD)
    yield proxy
    proxy.stop()


def without_keys(service: S3Service, **more: object) -> L2Adapter:
    """An adapter that has to find its credentials by itself."""
    given = {name: value for name, value in service.adapter_settings().items() if "access_key" not in name}
    adapter = load_plugins().build(Kind.L2_ADAPTER, "s3", {**given, **more}, adapter_context("cold", 4))
    assert isinstance(adapter, L2Adapter)
    return adapter


def assert_serves(adapter: L2Adapter, label: str, nbytes: int = 3 << 20) -> None:
    key, content = label.encode()[-40:], (label.encode() * (nbytes // len(label) + 1))[:nbytes]
    stored = store(adapter, key, content)
    assert stored.result is Result.DONE, stored.error
    outcome, found = load(adapter, key, nbytes)
    assert (outcome.result, found == content) == (Result.DONE, True), outcome.error


# --- TLS ----------------------------------------------------------------------------------------------------


@BOTH
def test_tls_with_a_ca_of_ones_own(
    service: S3Service,
    tls: TlsFront,
    certificates: Certificates,
    label: str,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with build(service, endpoint_url=tls.url, ca_bundle=certificates.ca, transport=transport) as adapter:
        assert_serves(adapter, label)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.ca))
    with build(service, endpoint_url=tls.url, transport=transport) as adapter:
        assert_serves(adapter, f"{label}-by-environment")


@BOTH
def test_a_wrong_ca_is_refused_with_the_cure(
    service: S3Service, tls: TlsFront, certificates: Certificates, label: str, transport: str
) -> None:
    for trusted in ({"ca_bundle": certificates.other_ca}, {}):
        with build(service, endpoint_url=tls.url, transport=transport, **trusted) as adapter:
            refused = store(adapter, label.encode()[-40:])
            assert refused.result is Result.FAILED
            assert "ca_bundle" in refused.error
            assert not refused.retryable, "another try meets the same certificate"


def test_tls_may_be_trusted_blindly_if_one_says_so(service: S3Service, tls: TlsFront, label: str) -> None:
    with build(service, endpoint_url=tls.url, verify_tls=False) as adapter:
        assert_serves(adapter, label)


# --- proxies ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("by", ["setting", "environment"])
def test_a_proxy_is_asked_for_a_tunnel(
    service: S3Service,
    tls: TlsFront,
    certificates: Certificates,
    connect_proxy: ConnectProxy,
    label: str,
    transport: str,
    by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from urllib.parse import quote

    url = f"http://{PROXY_USER}:{quote(PROXY_PASSWORD, safe='')}@127.0.0.1:{connect_proxy.port}"
    more: dict[str, object] = {"endpoint_url": tls.url, "ca_bundle": certificates.ca, "transport": transport}
    if by == "setting":
        more["proxy"] = url
    else:
        monkeypatch.setenv("HTTPS_PROXY", url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
    with build(service, **more) as adapter:
        assert_serves(adapter, label)
    assert set(connect_proxy.tunnels) == {f"127.0.0.1:{tls.port}"}


@BOTH
def test_a_proxy_that_refuses_is_said_without_its_password(
    service: S3Service,
    tls: TlsFront,
    certificates: Certificates,
    connect_proxy: ConnectProxy,
    label: str,
    transport: str,
) -> None:
    url = f"http://{PROXY_USER}:guessed-and-secret@127.0.0.1:{connect_proxy.port}"
    with build(service, endpoint_url=tls.url, ca_bundle=certificates.ca, proxy=url, transport=transport) as adapter:
        refused = store(adapter, label.encode()[-40:])
        assert refused.result is Result.FAILED
        assert "proxy" in refused.error.lower()
        assert "guessed-and-secret" not in refused.error + repr(adapter) + repr(vars(adapter))
    assert connect_proxy.refused


# --- credentials --------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("by", ["setting", "environment"])
def test_a_profile_gives_keys_and_region(
    service: S3Service, tmp_path: Path, label: str, transport: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = f"aws_access_key_id = {service.access_key}\naws_secret_access_key = {service.secret_key}\n"
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = NOBODY\naws_secret_access_key = wrong\n[cache]\n{keys}"
    )
    (tmp_path / "config").write_text("[profile cache]\nregion = eu-test-1\n")
    if by == "environment":
        monkeypatch.setenv("AWS_PROFILE", "cache")
    more = {"profile": "cache"} if by == "setting" else {}
    with without_keys(service, transport=transport, region=None, **more) as adapter:
        assert_serves(adapter, label)
        about: Any = adapter
        assert about.client.account.credentials().access_key == service.access_key
        assert about.client.account.endpoint().region == "eu-test-1"


@BOTH
def test_a_web_identity_is_exchanged_for_credentials(
    service: S3Service, front: Any, tmp_path: Path, label: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pod with a service account has it: a token in a file, and a role."""
    if service.name != "s3-moto":
        pytest.skip("the gateway of these tests exchanges no tokens")
    (tmp_path / "token").write_text("a.web.token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/cache")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", front.url)
    with without_keys(service, endpoint_url=front.url, transport=transport) as adapter:
        assert_serves(adapter, label)
    asked = [seen for seen in front.seen if seen.method == "POST" and seen.path == "/"]
    assert len(asked) == 1, "asked once, and kept until it expires"
    puts = [seen for seen in front.seen if seen.method == "PUT"]
    assert puts
    assert all("x-amz-security-token" in seen.headers for seen in puts)


def test_a_key_that_is_withdrawn_is_said_and_the_next_one_is_taken_from_its_file(
    service: S3Service, tmp_path: Path, label: str
) -> None:
    if service.name != "s3-radosgw":
        pytest.skip("moto checks no signature")

    def write(access_key: str) -> None:
        words = f"aws_access_key_id = {access_key}\naws_secret_access_key = {label}-secret\n"
        (tmp_path / "credentials").write_text(f"[default]\n{words}")

    old, new = f"OLD{label[-8:]}", f"NEW{label[-8:]}"
    service.make_key(old, f"{label}-secret")
    write(old)
    key = label.encode()[-40:]
    with without_keys(service) as adapter:
        assert store(adapter, key).result is Result.DONE
        service.remove_key(old)
        refused = until(lambda: _refusal(adapter, key), "the key to be refused")
        assert "InvalidAccessKeyId" in refused
        assert f"{label}-secret" not in refused
        service.make_key(new, f"{label}-secret")
        write(new)
        until(lambda: store(adapter, key).result is Result.DONE, "the new key")
        service.remove_key(new)


def _refusal(adapter: L2Adapter, key: bytes) -> str:
    outcome = store(adapter, key)
    return "" if outcome.result is Result.DONE else outcome.error
