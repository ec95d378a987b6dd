"""The keys of one serde: read once, named by an id that reveals nothing about them, never shown."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lmcache_core.errors import SettingsError
from lmcache_core.textfiles import text_of
from lmcache_crypto.settings import AesGcmSettings

KEY_BYTES = 32
KEY_ID_BYTES = 8
KEY_FILE_BYTES_MAX = 64 << 10  # some hundred keys; a wrong path (a disk image, /dev/zero) must not fill the memory
_KEY_ID_LABEL = b"lmcache-crypto key id 1"
_CURE = "make one with openssl rand -hex 32; a key is 32 bytes as 64 hexadecimal digits or as base64"


class Keyring:
    """Ciphers by key id. `current_id` is the id of the key that encrypts."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._ciphers: dict[bytes, AESGCM] = {}
        ids = []
        for key in keys:
            ids.append(key_id_of(key))
            self._ciphers[ids[-1]] = AESGCM(key)
        self.current_id = ids[0]

    @property
    def current(self) -> AESGCM:
        return self._ciphers[self.current_id]

    @property
    def ids(self) -> tuple[bytes, ...]:
        """The current key's first."""
        return tuple(self._ciphers)

    def cipher(self, key_id: bytes) -> AESGCM | None:
        return self._ciphers.get(key_id)

    def __repr__(self) -> str:
        return f"<Keyring of {len(self._ciphers)} keys, current id {self.current_id.hex()}>"


def key_id_of(key: bytes) -> bytes:
    """A key's public name. One-way: the key is random, and the id is a keyed hash of a fixed label under it."""
    return hmac.new(key, _KEY_ID_LABEL, hashlib.sha256).digest()[:KEY_ID_BYTES]


def keyring_of(settings: AesGcmSettings) -> Keyring:
    """Read the keys. Raises SettingsError that names the source and the place in it, but never quotes its text."""
    if settings.key_file is not None:
        where, text = f"key_file {settings.key_file}", _text_of(settings.key_file)
    elif settings.key_env is not None:
        where = f"the environment variable {settings.key_env}"
        text = os.environ.get(settings.key_env, "")
    else:
        where = "keys"
        text = settings.keys.get_secret_value() if settings.keys is not None else ""
    words = [word for line in text.splitlines() for word in re.split(r"[\s,]+", line.partition("#")[0]) if word]
    if not words:
        raise SettingsError(f"serde aesgcm: {where} holds no key", cure=_CURE)
    keys = [_decoded(word, f"{where}, key {number}") for number, word in enumerate(words, start=1)]
    if len(set(keys)) != len(keys):
        raise SettingsError(f"serde aesgcm: {where} holds the same key twice", cure="remove one")
    return Keyring(keys)


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(KEY_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise SettingsError(f"serde aesgcm: key_file {path} cannot be read: {error.strerror}") from error
    if len(data) > KEY_FILE_BYTES_MAX:
        raise SettingsError(f"serde aesgcm: key_file {path} is over {KEY_FILE_BYTES_MAX:,} bytes: it is not a key file")
    try:
        return text_of(data, path)
    except ValueError as error:
        raise SettingsError(f"serde aesgcm: key_file {error}") from None


def _decoded(word: str, where: str) -> bytes:
    key = _hexadecimal(word) or _base64(word)
    if key is None or len(key) != KEY_BYTES:
        raise SettingsError(f"serde aesgcm: {where} is not a key", cure=_CURE)
    return key


def _hexadecimal(word: str) -> bytes | None:
    return bytes.fromhex(word) if re.fullmatch(r"[0-9a-fA-F]{64}", word) else None


def _base64(word: str) -> bytes | None:
    """Standard or URL alphabet, with or without padding."""
    plain = word.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except binascii.Error:
        return None
