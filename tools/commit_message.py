"""Checks the form of commit messages: `commit_message.py FILE` one that is being written (pre-commit), without FILE all
since this check exists (CI).

A subject reads "area: what changed", in the imperative and at most 72 characters; the body, after an empty line, says
why. Merges are free. Shallow clones are checked as far as they go.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SUBJECT_MAX = 72
FORM = re.compile(r"[a-z0-9][a-z0-9_./, -]*: [^\s].*[^.\s]$")
# They say that somebody talks, not what changed.
VAGUE = ("say", "let", "give", "hold", "have", "tell")


def faults_of(message: str) -> list[str]:
    """What is wrong with a message; nothing for a merge."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith("Merge "):
        return []
    faults = []
    if not FORM.match(subject):
        faults.append(
            'begin with "area: what changed", without a full stop: kernel: free leases of dead sessions in steps'
        )
    elif subject.split(": ", 1)[1].split()[0].lower() in VAGUE:
        faults.append(f"say what changed with another verb than {', '.join(VAGUE)}")
    if len(subject) > SUBJECT_MAX:
        faults.append(f"the subject has {len(subject)} characters: at most {SUBJECT_MAX}")
    if len(lines) < 3 or lines[1].strip() or not any(line.strip() for line in lines[2:]):
        faults.append("after an empty line, say why")
    return faults


def messages_since_this_check() -> list[str]:
    """Of all commits after the one that added this file."""
    here = Path(__file__).resolve()
    try:
        added = _git(here.parent, "log", "--diff-filter=A", "--format=%H", "--", here.name).split()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no history to look at: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
        return []
    if not added:
        return []
    log = _git(here.parent, "log", "--format=%B%x00", f"{added[-1]}..HEAD")
    return [text.lstrip("\n") for text in log.split("\0")[:-1]]


def _git(folder: Path, *argv: str) -> str:
    return subprocess.run(["git", *argv], cwd=folder, check=True, capture_output=True, text=True).stdout


def main(argv: list[str]) -> int:
    messages = [Path(argv[0]).read_text(encoding="utf-8")] if argv else messages_since_this_check()
    wrong = [(message.partition("\n")[0], faults) for message in messages if (faults := faults_of(message))]
    for subject, faults in wrong:
        print(f"{subject!r}:", *faults, sep="\n  ", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
