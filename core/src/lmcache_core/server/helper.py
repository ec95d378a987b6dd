"""The contract of helpers: processes that start with the server, are restarted if they end, and stop with it.

Any command can be one, `[helpers.NAME] command = […]`. A plugin offers one as a component of `Kind.HELPER`: a table
with its name in the settings, `[NAME]`, enables it, and its factory says what to run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "HelperContext",
    "HelperProcess",
]


@dataclass(frozen=True)
class HelperContext:
    """What a helper's factory knows about the server.

    Attributes:
        server: Its name.
        address: Its lifeline, where a client on this node connects.
        runtime_dir: The directory of the lifelines.
        python: The server's interpreter, for a helper that is a module of the same installation.
    """

    server: str
    address: str
    runtime_dir: Path
    python: str = sys.executable


@dataclass(frozen=True)
class HelperProcess:
    """What to run. Others can see both parts, so they must not contain secrets: name a file that only the user may
    read.

    Attributes:
        command: Program and arguments; no shell is involved.
        environment: Added to what every helper gets.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
