"""Which files settings are read from. Nothing is imported here, for commands that need no file."""

from __future__ import annotations

from pathlib import Path

PREFIX = "LMCACHE_CORE_"
DEFAULT_FILE = "lmcache.toml"
ENV_FILE_VARIABLE = f"{PREFIX}ENV_FILE"


def find_file(given: str | Path | None) -> Path | None:
    """The file to read: the given one, else `lmcache.toml` in the current directory, else None."""
    if given is not None:
        return Path(given)
    here = Path(DEFAULT_FILE)
    return here if here.is_file() else None
