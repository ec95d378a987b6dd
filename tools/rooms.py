"""Prints how large each room and each package is, in lines: `rooms.py [COMMIT ...]`, for commits or (none given) for
what is in the working tree. The table of docs/internals/rooms.md is made by it.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
CORE = "core/src/lmcache_core/"
KINDS = {".py": "code", ".c": "C", ".h": "C"}


def lines_of(commit: str | None) -> Counter[tuple[str, str]]:
    """Lines by room (or package) and kind."""
    found: Counter[tuple[str, str]] = Counter()
    for name in _git("ls-tree", "-r", "--name-only", commit) if commit else _git("ls-files"):
        path = PurePosixPath(name)
        kind = KINDS.get(path.suffix)
        if kind is None or (commit is None and not (ROOT / name).exists()):
            continue
        text = "\n".join(_git("show", f"{commit}:{name}")) if commit else (ROOT / name).read_text(encoding="utf-8")
        tests = "tests" in path.parts
        found[_room_of(path), "tests" if tests else kind] += text.count("\n") + 1
    return found


def _room_of(path: PurePosixPath) -> str:
    name = str(path)
    if name.startswith(CORE):
        inside = PurePosixPath(name.removeprefix(CORE))
        return f"core: {inside.parts[0]}/" if len(inside.parts) > 1 else "core: single modules"
    if path.parts[0] in ("contrib", "plugins") and len(path.parts) > 2:
        return path.parts[1]
    return "core: native" if name.startswith("core/native") else "core" if path.parts[0] == "core" else path.parts[0]


def _git(*argv: str | None) -> list[str]:
    words = ["git", *(word for word in argv if word)]
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def main(commits: list[str]) -> None:
    columns = [(commit, lines_of(commit)) for commit in commits] or [("now", lines_of(None))]
    heads = [f"{kind}{f' at {name}' if commits else ''}" for name, _ in columns for kind in ("code", "C", "tests")]
    print("| room |", " | ".join(heads), "|")
    print("|---|" + "---:|" * len(heads))
    for room in sorted({room for _, lines in columns for room, _ in lines}):
        cells = [lines[room, kind] for _, lines in columns for kind in ("code", "C", "tests")]
        print(f"| {room} |", " | ".join(f"{cell:,}" if cell else "" for cell in cells), "|")


if __name__ == "__main__":
    main(sys.argv[1:])
