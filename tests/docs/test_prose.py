"""Phrases that were corrected once do not come back, in any file. See docs/internals/prose.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MENDED = {
    r"\bis no setting\b": "is not a setting",
    r"\bbehind everyone's back\b": "in the background",
    r"\bminute's half\b": "half a minute",
    r"\bstranger's word\b|\bdeceitful\b": "untrusted; returns wrong bytes",
    r"\blast use but one\b": "second-to-last use",
    r"\bnothing of it is kept\b": "it is not stored",
    r"\b(?:for|of|to) who (?:has|may|must|can|cannot|is|was|takes|waits|asks|reads|comes|maps)\b": "for callers that …",
    r"\bthis very\b|\bthe very\b": "this, or the same",
    r"\bleft alone\b|\bput aside\b": "not called, not touched, disabled",
    r"\bbegins? cold\b": "start cold",
    r"\bthe (?:tier's |tiers' own )?books\b(?! of)": "the accounts",
    r"\b(?:is|are|was|were) told (?:about|again|how many|nothing)\b": "gets; is notified; sees",
    r"\bin order to\b": "to",
    r"\butili[sz]e": "use",
    r"\bobviously\b|\beasily\b|\bseamless": "(nothing)",
    r"\be\.g\.|\bi\.e\.": "for example; that is",
    r"\bprior to\b": "before",
    r"\bdue to the fact that\b": "because",
}
QUOTED = {Path(__file__).name, "prose.md"}
NOT_OURS = {".nox", ".venv", ".venv-vllm", "cache", "build", "dist", "node_modules"}


def written() -> list[Path]:
    return [
        path
        for kind in ("*.md", "*.py")
        for path in sorted(ROOT.rglob(kind))
        if path.name not in QUOTED and not NOT_OURS & set(path.relative_to(ROOT).parts)
    ]


@pytest.mark.parametrize("phrase", MENDED)
def test_a_phrase_that_was_mended_does_not_come_back(phrase: str) -> None:
    pattern = re.compile(phrase, re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in written()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"write {MENDED[phrase]!r}:\n" + "\n".join(found)


def test_no_file_keeps_both_sides_of_a_merge() -> None:
    listed = subprocess.run(["git", "grep", "-lE", "^(<<<<<<<|>>>>>>>) "], cwd=ROOT, capture_output=True, text=True)
    assert not listed.stdout
