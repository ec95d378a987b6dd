from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lmcache_transformers.demo.report import Report, Row

ROW = Row(
    step=2,
    run="another question",
    source="pool",
    tokens_prompt=1060,
    tokens_reused=1024,
    cold_s=2.0,
    warm_s=0.1,
    moved="retrieved",
    bytes_moved=16 << 20,
    move_s=0.01,
    equal=True,
)


def finished(*rows: Row) -> Report:
    report = Report(as_json=True)
    for row in rows:
        report.row(row)
    report.check("a claim", True)
    report.finish()
    return report


def test_a_demo_is_ok_only_if_it_was_finished_and_everything_held() -> None:
    assert finished(ROW).ok
    assert not finished(ROW, replace(ROW, equal=False)).ok
    broken = finished(ROW)
    broken.check("another claim", False)
    assert not broken.ok
    failed = finished(ROW)
    failed.fail("the server ended")
    assert not failed.ok
    unfinished = Report(as_json=True)
    unfinished.row(ROW)
    assert not unfinished.ok
    empty = Report(as_json=True)
    empty.finish()
    assert not empty.ok


def test_json_is_one_object_with_ok_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    report = finished(ROW)
    report.step("not printed: nothing but the object goes out")
    report.print()
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["ok"] is True
    assert found["rows"][0]["tokens_reused"] == 1024
    assert found["rows"][0]["gb_per_s"] == pytest.approx((16 << 20) / 0.01 / 1e9)
    assert found["checks"] == [{"claim": "a claim", "held": True, "seen": ""}]
    assert "error" not in found


def test_the_table_shows_what_was_reused_and_when_the_answer_came(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(as_json=False)
    report.row(ROW)
    report.check("a claim", False, "what was seen")
    report.fail("why it ended")
    report.print()
    out, _ = capsys.readouterr()
    for part in ("1024 of 1060", "2.00", "0.10", "BROKEN  a claim (what was seen)", "why it ended"):
        assert part in out
    assert out.endswith("ok: no\n")


def test_a_trained_models_answers_are_shown_in_words_within_any_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(as_json=False, model="smollm2")
    report.row(replace(ROW, question="What is a slot?", answer="A fixed region of the pool. " * 8))
    report.print()
    out, _ = capsys.readouterr()
    assert "What is a slot? (another question, prefix from: pool)\n    A fixed region" in out
    assert max(map(len, out.splitlines())) < 80
