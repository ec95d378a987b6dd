"""What `lmcache-core check` says about the keys: whether they can be read, and by whom else."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.errors import SettingsError
from lmcache_core.plugins.components import Finding
from lmcache_crypto.keyring import keyring_of
from lmcache_crypto.settings import AesGcmSettings

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings


def check_keys(settings: Settings) -> Sequence[Finding]:
    """One finding for each tier that encrypts. It contains no key or part of one; ids are public."""
    return [
        _finding(name, serde.settings)
        for name, tier in settings.l2.items()
        for serde in tier.serde
        if serde.type == "aesgcm" and isinstance(serde.settings, AesGcmSettings)
    ]


def _finding(tier: str, chosen: AesGcmSettings) -> Finding:
    subject = f"keys of tier {tier}"
    try:
        keyring = keyring_of(chosen)
    except SettingsError as error:
        return Finding.of_error(subject, error, "correct the source of the keys, or start without the tier")
    if chosen.key_file is not None and (others := _readers(chosen.key_file)):
        cure = f"chmod 600 {chosen.key_file}; for a mounted secret, set its defaultMode to 0400"
        return Finding(False, subject, f"{chosen.key_file} can be read by {others}", cure)
    count = len(keyring.ids)
    return Finding(True, subject, f"{count} key{'s' if count > 1 else ''}, current id {keyring.current_id.hex()}")


def _readers(path: Path) -> str:
    """Who beside the owner can read the file, in words; empty if nobody can."""
    mode = path.stat().st_mode
    if mode & stat.S_IROTH:
        return "everybody on the machine"
    return "its group" if mode & stat.S_IRGRP else ""
