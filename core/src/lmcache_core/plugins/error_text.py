"""What the exception of a third party's code says, fit for a log and a terminal."""

from __future__ import annotations

import re

from lmcache_core.guard import guarded
from lmcache_core.limits import PLUGIN_ERROR_CHARS_MAX

_USER_OF_URL = re.compile(r"(?<=://)[^\s/@'\"]+(?:/[^\s@'\"]*)?@")
_SECRET = re.compile(
    r"""(?i)([\w-]*(?:password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|credential|authorization)[\w-]*)
        (['"]?\s*[=:]\s*)(?:bearer\s+|basic\s+)?("[^"]*"|'[^']*'|[^\s,;&)}\]]+)""",
    re.VERBOSE,
)


def error_text(error: BaseException) -> str:
    """Type and text of an exception on one line, without passwords, and without what steers a terminal."""
    text = guarded(lambda second: f"its text cannot be read: {type(second).__name__}", str, error)
    text = _SECRET.sub(r"\1\2***", _USER_OF_URL.sub("***@", text))
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in " ".join(text.split()))
    if len(text) > PLUGIN_ERROR_CHARS_MAX:
        text = f"{text[:PLUGIN_ERROR_CHARS_MAX]}…"
    return f"{type(error).__name__}: {text}"
