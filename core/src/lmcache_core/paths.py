"""The one rule for paths that people write: settings, environment variables, arguments of `connect`.

An empty text is unset, `~` is expanded, and a relative path is refused: servers, helpers and clients start in different
directories, so it would name another file in each of them.
"""

from __future__ import annotations

import os
from pathlib import Path


def absolute_path(value: str | os.PathLike[str]) -> Path:
    """The path as one of the file system. Raises `ValueError` that says what is wrong with it, and the cure."""
    text = os.fspath(value)
    if not text.strip():
        raise ValueError("the path is empty: write an absolute path, or leave the setting out")
    if any(ord(letter) < 32 or letter == "\x7f" for letter in text):
        raise ValueError(f"path {text!r} has control characters: write it without them")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # ~nobody, or no HOME and no entry in the user database
        raise ValueError(f"path {text!r} cannot be expanded, since there is no such home: write it in full") from error
    if not path.is_absolute():
        raise ValueError(f"path {text!r} is relative: make it absolute, as the next server may start elsewhere")
    return path


def path_or_none(value: str | os.PathLike[str] | None) -> Path | None:
    """The same for a path that may be unset: None, or an empty text."""
    if value is None or not os.fspath(value).strip():
        return None
    return absolute_path(value)


def xdg_path(environ_value: str | None) -> Path | None:
    """A base directory from a variable of the XDG specification, by which a relative path counts as unset."""
    return Path(environ_value) if environ_value and Path(environ_value).is_absolute() else None
