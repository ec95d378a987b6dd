"""The one rule for text files that people write: settings, tokens, keys, a model's configuration.

They are UTF-8. A byte order mark, which some editors write, is left out; lines may end as on Windows. UTF-16, which
other editors call "Unicode", is named in the error.
"""

from __future__ import annotations

import codecs
from pathlib import Path

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text_file(path: Path) -> str:
    """The file's text, with line ends as `\\n`. Raises `OSError`, and `ValueError` if it is not UTF-8."""
    return text_of(path.read_bytes(), path)


def text_of(content: bytes, path: Path) -> str:
    """The text of a file's bytes; `path` stands in errors only."""
    if content.startswith(_UTF_16):
        raise ValueError(f"{path} is saved as UTF-16 (its byte order mark says so): save it as UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8, as its byte {error.start:,} shows: save it as UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
