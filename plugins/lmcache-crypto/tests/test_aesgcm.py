"""AES-GCM: the bytes come back only for their own key and layout, and only under a known key."""

from __future__ import annotations

import base64
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from lmcache_core.errors import DamagedObjectError, MismatchedObjectError, SettingsError
from lmcache_core.plugins.components import Kind
from lmcache_core.pool.layout import Layout
from lmcache_crypto import serde as serde_module
from lmcache_crypto.keyring import key_id_of, keyring_of
from lmcache_crypto.serde import BOUND, HEAD, AesGcmSerde
from lmcache_crypto.settings import AesGcmSettings

KEY = bytes(range(32))
SECRET = random.Random(1).randbytes(32)
OLDER = random.Random(2).randbytes(32)
LAYOUT = Layout("uint8", (100,))


def serde_of(*secrets: bytes) -> AesGcmSerde:
    return AesGcmSerde(AesGcmSettings(keys=SecretStr(" ".join(secret.hex() for secret in secrets))))


SERDE = serde_of(SECRET)


def encoded(serde: AesGcmSerde, data: bytes | bytearray, layout: Layout = LAYOUT, key: bytes = KEY) -> bytes:
    (only,) = serde.encode(memoryview(data).toreadonly(), layout, key)
    return bytes(only)


def decoded(serde: AesGcmSerde, data: bytes, nbytes: int, layout: Layout = LAYOUT, key: bytes = KEY) -> bytes:
    out = bytearray(b"\xa5" * nbytes)
    serde.decode(memoryview(data).toreadonly(), memoryview(out), layout, key)
    return bytes(out)


# --- bytes -----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=2000), key=st.binary(min_size=32, max_size=32))
def test_any_bytes_come_back_and_the_size_is_exact(data: bytes, key: bytes) -> None:
    layout = Layout("uint8", (max(1, len(data)),))
    sealed = encoded(SERDE, data, layout, key)
    assert len(sealed) == SERDE.encoded_bytes_max(len(data), layout)
    assert decoded(SERDE, sealed, len(data), layout, key) == data


@pytest.mark.parametrize("nbytes", [0, 1, 5 << 20])
def test_empty_one_byte_and_large_objects_come_back(nbytes: int) -> None:
    data = random.Random(3).randbytes(nbytes)
    assert decoded(SERDE, encoded(SERDE, data), nbytes) == data


def test_what_is_sealed_is_plain_aes_gcm_over_what_the_module_documents() -> None:
    data = random.Random(4).randbytes(100)
    sealed = encoded(SERDE, data)
    head, nonce, rest = sealed[: HEAD.size], sealed[HEAD.size : HEAD.size + 12], sealed[HEAD.size + 12 :]
    bound = head + BOUND.pack(LAYOUT.fingerprint, 0) + KEY
    assert AESGCM(SECRET).decrypt(nonce, rest, bound) == data
    assert data[:16] not in sealed


def test_every_object_has_a_fresh_nonce() -> None:
    sealed = {encoded(SERDE, bytes(100)) for _ in range(200)}
    assert len({one[HEAD.size : HEAD.size + 12] for one in sealed}) == 200
    assert len({one[HEAD.size + 12 :] for one in sealed}) == 200


def test_the_source_is_untouched_and_not_part_of_the_answer() -> None:
    data = bytearray(random.Random(5).randbytes(3000))
    before = bytes(data)
    layout = Layout("uint8", (3000,))
    (only,) = SERDE.encode(memoryview(data).toreadonly(), layout, KEY)
    assert bytes(data) == before
    data[:] = bytes(3000)
    assert decoded(SERDE, bytes(only), 3000, layout) == before


# --- what must not pass ----------------------------------------------------------------------------------------


def test_every_flipped_bit_is_damage() -> None:
    sealed = encoded(SERDE, random.Random(6).randbytes(100))
    for bit in range(8 * len(sealed)):
        flipped = bytearray(sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedObjectError, match=KEY.hex()[:16]):
            decoded(SERDE, bytes(flipped), 100)


def test_every_cut_and_every_addition_is_damage() -> None:
    sealed = encoded(SERDE, random.Random(7).randbytes(100))
    for wrong in [sealed[:cut] for cut in range(len(sealed))] + [sealed + b"\0"]:
        with pytest.raises(DamagedObjectError, match="bytes came back"):
            decoded(SERDE, wrong, 100)


def test_an_object_is_refused_under_another_key_or_layout() -> None:
    sealed = encoded(SERDE, bytes(100))
    with pytest.raises(DamagedObjectError, match="authentication"):
        decoded(SERDE, sealed, 100, key=bytes(32))
    with pytest.raises(DamagedObjectError, match="authentication"):
        decoded(SERDE, sealed, 100, layout=Layout("int8", (100,)))
    with pytest.raises(DamagedObjectError, match="needs"):
        decoded(SERDE, sealed, 99, layout=Layout("uint8", (99,)))


def test_a_key_that_is_not_here_is_named_by_its_id() -> None:
    sealed = encoded(SERDE, bytes(100))
    with pytest.raises(MismatchedObjectError, match="left where it is") as caught:
        decoded(serde_of(OLDER), sealed, 100)
    assert key_id_of(SECRET).hex() in str(caught.value)
    assert key_id_of(OLDER).hex() in str(caught.value)


def test_the_id_of_a_known_key_on_another_keys_object_is_refused() -> None:
    sealed = bytearray(encoded(serde_of(OLDER), bytes(100)))
    sealed[HEAD.size - 8 : HEAD.size] = key_id_of(SECRET)
    with pytest.raises(DamagedObjectError, match="authentication"):
        decoded(serde_of(SECRET, OLDER), bytes(sealed), 100)


def test_rotation_reads_old_objects_and_writes_under_the_new_key() -> None:
    old = encoded(serde_of(OLDER), b"x" * 100)
    rotated = serde_of(SECRET, OLDER)
    assert decoded(rotated, old, 100) == b"x" * 100
    assert decoded(serde_of(SECRET), encoded(rotated, b"y" * 100), 100) == b"y" * 100
    assert rotated.parameters() == serde_of(OLDER).parameters() == {"format": 2}


def test_large_objects_go_in_segments_that_cannot_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serde_module, "SEGMENT_BYTES", 64)
    data = random.Random(8).randbytes(64 * 3 + 10)
    layout = Layout("uint8", (len(data),))
    sealed = encoded(SERDE, data, layout)
    assert len(sealed) == SERDE.encoded_bytes_max(len(data), layout) == HEAD.size + len(data) + 4 * 28
    assert decoded(SERDE, sealed, len(data), layout) == data
    segments = [sealed[HEAD.size + i * 92 : HEAD.size + (i + 1) * 92] for i in range(4)]
    again = encoded(SERDE, data[:-1] + b"!", layout)
    for order in ([1, 0, 2, 3], [0, 0, 2, 3]):
        with pytest.raises(DamagedObjectError, match="authentication"):
            decoded(SERDE, sealed[: HEAD.size] + b"".join(segments[i] for i in order), len(data), layout)
    with pytest.raises(DamagedObjectError, match="authentication"):
        decoded(SERDE, sealed[:-16] + again[-16:], len(data), layout)


def test_threads_on_one_instance_get_their_own_objects_back() -> None:
    wrong: list[int] = []
    layout = Layout("uint8", (200_000,))

    def work(seed: int) -> None:
        data, key = random.Random(seed).randbytes(200_000), bytes([seed]) * 32
        for _ in range(10):
            if decoded(SERDE, encoded(SERDE, data, layout, key), 200_000, layout, key) != data:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def lets_others_run(call: Callable[[], object], within_s: float = 60.0) -> bool:
    """Whether another thread runs during one of the calls. Nobody is made to give up the GIL meanwhile, so one that
    runs was let run; on a busy machine it comes too late for most calls, so they are repeated until it has come."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        ran: list[bool] = []
        gate = threading.Lock()
        gate.acquire()
        thread = threading.Thread(target=lambda: gate.acquire() and ran.append(True))
        thread.start()
        gate.release()
        until = time.monotonic() + within_s
        call()
        while not ran and time.monotonic() < until:
            call()
        seen = bool(ran)
        thread.join()
        return seen
    finally:
        sys.setswitchinterval(interval_s)


def test_decryption_lets_other_threads_run() -> None:
    layout = Layout("uint8", (16 << 20,))
    sealed = memoryview(encoded(SERDE, bytes(layout.nbytes), layout))
    out = memoryview(bytearray(layout.nbytes))
    assert lets_others_run(lambda: SERDE.decode(sealed, out, layout, KEY))
    assert not lets_others_run(lambda: bytes(out), within_s=0.1)  # a call that holds the GIL is told apart


def test_encryption_lets_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # The system's random numbers release the GIL too; without them only the cipher is left to do so.
    monkeypatch.setattr(os, "urandom", bytes)
    layout = Layout("uint8", (16 << 20,))
    data = memoryview(bytes(layout.nbytes))
    assert lets_others_run(lambda: SERDE.encode(data, layout, KEY))


# --- keys and settings -----------------------------------------------------------------------------------------

SPELLINGS = {
    "hex": SECRET.hex(),
    "HEX": SECRET.hex().upper(),
    "base64": base64.b64encode(SECRET).decode(),
    "url": base64.urlsafe_b64encode(SECRET).decode(),
    "unpadded": base64.b64encode(SECRET).decode().rstrip("="),
}


@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
def test_a_key_may_come_from_a_file_the_environment_or_a_setting(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"# current\n{SPELLINGS[spelling]}  # since March\n\n{OLDER.hex()}\n"
    (tmp_path / "keys").write_text(text)
    monkeypatch.setenv("KV_KEYS", f"{SPELLINGS[spelling]},{OLDER.hex()}")
    for source in (
        AesGcmSettings(key_file=tmp_path / "keys"),
        AesGcmSettings(key_env="KV_KEYS"),
        AesGcmSettings(keys=SecretStr(f"{SPELLINGS[spelling]} {OLDER.hex()}")),
    ):
        assert keyring_of(source).ids == (key_id_of(SECRET), key_id_of(OLDER))


def test_a_key_id_tells_keys_apart_and_shares_no_bytes_with_them() -> None:
    ids = {key_id_of(os.urandom(32)) for _ in range(500)}
    assert len(ids) == 500
    assert key_id_of(SECRET).hex() not in SECRET.hex()
    assert key_id_of(SECRET) == key_id_of(bytes(SECRET))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        (SECRET.hex()[:-1], "key 1 is not a key"),
        (f"{SECRET.hex()} hunter2-hunter2", "key 2 is not a key"),
        (f"{SECRET.hex()} {base64.b64encode(SECRET).decode()}", "same key twice"),
    ],
)
def test_a_bad_source_of_keys_is_named_and_its_text_is_not(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    for settings_of_it in (AesGcmSettings(key_file=tmp_path / "keys"), AesGcmSettings(keys=SecretStr(text))):
        with pytest.raises(SettingsError, match=words) as caught:
            AesGcmSerde(settings_of_it)
        for word in text.replace("#", "").split():
            assert word not in str(caught.value) or word == "nothing"
        assert caught.value.__context__ is None


def test_a_missing_file_or_variable_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_KEYS", raising=False)
    with pytest.raises(SettingsError, match="KV_KEYS"):
        AesGcmSerde(AesGcmSettings(key_env="KV_KEYS"))
    with pytest.raises(SettingsError, match="no-such-file cannot be read"):
        AesGcmSerde(AesGcmSettings(key_file=tmp_path / "no-such-file"))
    with pytest.raises(SettingsError, match="not a key file"):
        AesGcmSerde(AesGcmSettings(key_file=Path("/dev/zero")))


def test_settings_take_one_source_are_frozen_and_refuse_what_they_do_not_know() -> None:
    for wrong in ({}, {"key_env": "A", "keys": "b"}, {"key": "c"}, {"key_env": ""}):
        with pytest.raises(ValidationError):
            AesGcmSettings.model_validate(wrong)
    with pytest.raises(ValidationError):
        AesGcmSettings(key_env="A").key_env = "B"


def test_no_repr_dump_log_or_error_shows_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    chosen = AesGcmSettings(keys=SecretStr(SECRET.hex()))
    serde = AesGcmSerde(chosen)
    shown = [repr(chosen), str(chosen), str(chosen.model_dump()), chosen.model_dump_json(), repr(serde), str(serde)]
    shown += [str(serde.parameters()), repr(keyring_of(chosen)), str(vars(serde)), caplog.text]
    for wrong in ({"keys": int(SECRET.hex(), 16)}, {"keys": SECRET.hex(), "key_env": SECRET.hex()}):
        with pytest.raises(ValidationError) as caught:
            AesGcmSettings.model_validate(wrong)
        shown.append(str(caught.value))
    with pytest.raises(DamagedObjectError) as damaged:
        decoded(serde, encoded(serde_of(OLDER), bytes(100)), 100)
    shown.append(str(damaged.value))
    secrets = [
        text for secret in (SECRET, OLDER) for text in (secret.hex(), repr(secret)[2:-1], str(int(secret.hex(), 16)))
    ]
    assert not [text for text in secrets for each in shown if text in each]


@pytest.mark.parametrize(("mode", "words"), [(0o600, "1 key, current id"), (0o640, "its group"), (0o644, "everybody")])
def test_check_names_a_key_file_that_others_can_read(tmp_path: Path, mode: int, words: str) -> None:
    pytest.importorskip("lmcache_mock")  # a tier to encrypt for
    path = tmp_path / "keys"
    path.write_text(SECRET.hex())
    path.chmod(mode)
    options = {"l2.cold.type": "mock", "l2.cold.serde": f'[{{"type": "aesgcm", "key_file": "{path}"}}]'}
    command = [sys.executable, "-m", "lmcache_core.cli.main", "check", "--json"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert "keys of tier cold" in done.stdout, done.stdout + done.stderr
    assert words in done.stdout
    assert (done.returncode == 0) == (mode == 0o600)
    assert SECRET.hex() not in done.stdout + done.stderr


def test_a_serde_with_its_keys_cannot_be_pickled() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(SERDE)


def test_the_plugin_module_names_its_component_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, lmcache_crypto\n"
        "for spec in lmcache_crypto.lmcache_components(): print(spec.kind, spec.name, spec.factory, spec.settings)\n"
        "heavy = ('cryptography', 'pydantic', 'torch', 'numpy', 'zmq')\n"
        "print([m for m in sys.modules if m.split('.')[0] in heavy or m.startswith('lmcache_crypto.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{Kind.SERDE} aesgcm lmcache_crypto.serde:AesGcmSerde lmcache_crypto.settings:AesGcmSettings",
        "[]",
    ]
