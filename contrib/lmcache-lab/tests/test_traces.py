"""Traces: read from files that people give us, or made up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from lmcache_core.errors import UsageError
from lmcache_lab.workloads import SyntheticSettings, parse_synthetic, read_requests, read_trace, synthetic_trace


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_is_read_in_order_and_named_after_itself(tmp_path: Path) -> None:
    text = '{"timestamp": 9, "hash_ids": [1, 2]}\n\n{"hash_ids": []}\n{"hash_ids": [1, 3], "input_length": 1}\n'
    trace = read_trace(written(tmp_path / "day.jsonl", text))
    assert trace.name == "day"
    assert trace.requests == [[1, 2], [], [1, 3]]
    assert (trace.references, trace.unique_blocks) == (4, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"hash_ids": [1]}\n{"hash_ids": [1\n', r"t\.jsonl:2 is not JSON"),
        ("[1, 2]\n", r"t\.jsonl:1 has no usable hash_ids"),
        ('{"hash_ids": [true]}\n', "list of whole numbers"),
        ('{"hash_ids": [18446744073709551616]}\n', "at most 64 bits"),
        pytest.param("[" * 100_000 + "\n", r"t\.jsonl:1 is not JSON", id="nested"),
        ('{"hash_ids": [-1]}\n', "from 0 up"),
        ('{"hash_ids": "12"}\n', "no usable hash_ids"),
        ("\n\n", "has no requests"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_trace(written(tmp_path / "t.jsonl", text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.jsonl cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="binary cannot be read"):
        read_trace(tmp_path / "binary")


def test_a_seed_gives_the_same_trace_everywhere() -> None:
    # The figures are those of the first run ever: a change here changes everybody's comparisons.
    trace = synthetic_trace(SyntheticSettings(sessions=20, seed=7))
    assert (trace.name, len(trace.requests), trace.references, trace.unique_blocks) == ("synthetic-7", 151, 7448, 1147)
    assert sum(place * block for place, request in enumerate(trace.requests) for block in request) == 341_722_257
    assert synthetic_trace(SyntheticSettings(sessions=20, seed=8)).requests != trace.requests


def test_equal_ids_mean_equal_prefixes() -> None:
    parents: dict[int, int | None] = {}
    for request in synthetic_trace(SyntheticSettings(sessions=100)).requests:
        for parent, block in zip([None, *request], request, strict=False):
            assert parents.setdefault(block, parent) == parent


def test_sessions_share_prefixes_and_grow() -> None:
    settings = SyntheticSettings(sessions=50, prefixes=3, turns=4)
    trace = synthetic_trace(settings)
    firsts = Counter(request[0] for request in trace.requests)
    assert len(firsts) == settings.prefixes
    longest = {tuple(request) for request in trace.requests}
    grown = [request for request in longest if any(request[:n] in longest for n in range(1, len(request)))]
    assert len(grown) > len(trace.requests) // 2


def test_skew_prefers_few_prefixes() -> None:
    def top_share(skew: float) -> float:
        trace = synthetic_trace(SyntheticSettings(sessions=300, skew=skew))
        firsts = Counter(request[0] for request in trace.requests)
        return firsts.most_common(1)[0][1] / len(trace.requests)

    assert top_share(2.0) > 2 * top_share(0.0)


def test_a_spec_sets_what_it_names() -> None:
    assert parse_synthetic("") == SyntheticSettings()
    assert parse_synthetic("sessions=9, skew=0.5,seed=3") == SyntheticSettings(sessions=9, skew=0.5, seed=3)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("session=9", "'session' is not one of sessions, turns"),
        ("sessions=many", "not a number"),
        ("sessions=1.5", "not a number"),
        ("sessions=0", "sessions = 0 is below 1"),
        ("skew=-1", "skew = -1.0 is below 0"),
        ("skew=nan", "skew = nan is not finite"),
    ],
)
def test_a_spec_that_makes_no_trace_is_refused(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_synthetic(spec)


def test_lmcaches_log_of_lookups_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "lookup_hashes_20260401_143025_000000.jsonl"
    lines = [
        {"timestamp": 1775053825.5, "model_name": "a", "chunk_size": 256, "chunk_hashes": ["0xAB", "0xcd"]},
        {"timestamp": 1775053825.75, "model_name": "a", "chunk_size": 256, "chunk_hashes": ["0xab", "ef"]},
        {"timestamp": 1775053826.5, "model_name": "b", "chunk_size": 256, "chunk_hashes": ["0xab"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_trace(path).requests == [[0, 1], [0, 2], [3]]
    assert [at_ms for at_ms, _ in read_requests(path)] == [0.0, 250.0, 1000.0]


@pytest.mark.parametrize("hashes", ["0xab", ["0xzz"], [1], None])
def test_invalid_hashes_are_refused_with_file_and_line(tmp_path: Path, hashes: object) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"chunk_hashes": hashes}))
    with pytest.raises(UsageError, match=r"t\.jsonl:1 has no usable chunk_hashes"):
        read_trace(path)
