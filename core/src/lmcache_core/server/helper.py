"""The contract of helpers: processes beside the server, which start with it, are started again, and end with it.

Any command can be one, `[helpers.NAME] command = […]`. A plugin offers one by a component of `Kind.HELPER`: a table of
its name in the settings, `[NAME]`, brings it to life, and its factory says which process that is.
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
    """What a helper's factory may know of the server.

    Attributes:
        server: Its name.
        address: Its lifeline, where a client on this node connects.
        runtime_dir: The directory of the lifelines.
        python: The server's interpreter: a helper that is a module of the same installation runs by it.
    """

    server: str
    address: str
    runtime_dir: Path
    python: str = sys.executable


@dataclass(frozen=True)
class HelperProcess:
    """What is run. Both parts can be seen by others, so no secret stands in them: name a file that only the user may
    read.

    Attributes:
        command: Program and arguments; no shell is involved.
        environment: Comes on top of what every helper gets.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
