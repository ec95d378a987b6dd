"""The counts of docs/internals/ways.md are those of its lists, and the lists name what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/internals/ways.md").read_text()
WAYS = re.findall(r"^## ([^\n]+): (\d+) stops\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("way", "count", "text"), WAYS, ids=[way for way, _, _ in WAYS])
def test_a_way_has_as_many_stops_as_its_heading_says(way: str, count: str, text: str) -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    assert numbers == list(range(1, int(count) + 1))


@pytest.mark.parametrize(
    ("way", "most"),
    [
        ("A store", 10),
        ("A retrieve", 4),
        ("A load from a tier", 12),
        ("A setting", 8),
        ("A block that vLLM computed", 10),
        ("An eviction, to Prometheus", 6),
    ],
)
def test_a_way_has_no_more_stops_than_it_may(way: str, most: int) -> None:
    assert {way: int(count) for way, count, _ in WAYS}[way] <= most


@pytest.mark.parametrize(("way", "count", "text"), WAYS, ids=[way for way, _, _ in WAYS])
def test_every_stop_is_in_the_code(way: str, count: str, text: str) -> None:
    rooms = [ROOT / "core", ROOT / "plugins/lmcache-http", ROOT / "contrib/lmcache-core-vllm"]
    sources = [path for room in rooms for suffix in ("py", "pyi") for path in room.rglob(f"*.{suffix}")]
    code = "\n".join(path.read_text() for path in sources if "tests" not in path.parts)
    for name in re.findall(r"^\d+\. `(\w+)", text, re.MULTILINE):
        assert re.search(rf"\b(?:class|def) {name}\b", code), f"{name} is on the way of {way}, and nowhere in the code"
