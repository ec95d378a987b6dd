"""Faults on demand: each does what its name says, by rate, by script, by file, while the tier runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lmcache_core.cli.main import main
from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Outcome, Result
from lmcache_mock.adapter import MockAdapter
from lmcache_mock.control import write_rules
from lmcache_mock.settings import MockSettings
from lmcache_testing import material

CONTENT = material.content(1, 10_000)


def mock(**settings: Any) -> MockAdapter:
    return MockAdapter(MockSettings(**settings), AdapterContext(tier="mock"))


@pytest.fixture
def adapter() -> Iterator[MockAdapter]:
    with mock() as adapter:
        for number in range(20):
            material.store(adapter, material.key(number), material.content(number, 10_000))
        yield adapter


def load(adapter: MockAdapter, number: int) -> tuple[Outcome, bytes]:
    return material.load(adapter, material.key(number), 10_000)


def test_a_flipped_bit_is_one_bit(adapter: MockAdapter) -> None:
    adapter.set_faults("load flipped_bits")
    outcome, found = load(adapter, 3)
    assert (outcome.result, outcome.nbytes) == (Result.DONE, 10_000)
    true = material.content(3, 10_000)
    assert sum((one ^ other).bit_count() for one, other in zip(found, true, strict=True)) == 1


def test_a_neighbour_is_another_object_whole(adapter: MockAdapter) -> None:
    adapter.set_faults("load neighbour")
    outcome, found = load(adapter, 3)
    assert outcome.result is Result.DONE
    assert found in [material.content(number, 10_000) for number in range(20) if number != 3]


def test_a_short_read_says_done_for_less(adapter: MockAdapter) -> None:
    adapter.set_faults("load short_read")
    outcome, _ = load(adapter, 3)
    assert (outcome.result, outcome.nbytes) == (Result.DONE, 5000)


def test_a_lost_store_says_done_and_keeps_nothing(adapter: MockAdapter) -> None:
    adapter.set_faults("store lost")
    assert material.store(adapter, material.key(99), CONTENT).result is Result.DONE
    assert adapter.exists([material.key(99)], material.soon()) == [False]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("store full", Result.FULL),
        ("store error", Result.FAILED),
        ("any throttled", Result.THROTTLED),
    ],
)
def test_a_struck_store_is_an_outcome_and_leaves_nothing(adapter: MockAdapter, rule: str, expected: Result) -> None:
    adapter.set_faults(rule)
    assert material.store(adapter, material.key(99), CONTENT).result is expected
    assert material.key(99) not in adapter.memory.objects


def test_a_medium_that_was_gone_serves_its_objects_again(adapter: MockAdapter) -> None:
    adapter.set_faults("any gone")
    for call in (lambda: load(adapter, 3), lambda: adapter.exists([b"k"], material.soon())):
        with pytest.raises(TierError, match="gone"):
            call()
    adapter.set_faults()
    outcome, content = load(adapter, 3)
    assert (outcome.result, outcome.nbytes) == (Result.DONE, 10_000)
    assert content == material.content(3, 10_000)


def test_a_hang_ignores_its_deadline_and_ends_when_its_rule_goes(adapter: MockAdapter) -> None:
    adapter.set_faults("load hang")
    ended = threading.Event()
    outcomes: list[Outcome] = []

    def work() -> None:
        item = LoadItem(material.key(3), [memoryview(bytearray(10_000))])
        outcomes.extend(adapter.load([item], time.monotonic() + 0.01))
        ended.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert not ended.wait(0.2)
    assert adapter.exists([material.key(3)], material.soon()) == [True], "other operations go on"
    adapter.set_faults()
    assert ended.wait(60)
    assert (outcomes[0].result, outcomes[0].retryable) == (Result.FAILED, True)


def test_a_hang_ends_with_close(adapter: MockAdapter) -> None:
    adapter.set_faults("any hang")
    raised: list[BaseException] = []

    def work() -> None:
        try:
            load(adapter, 3)
        except TierError as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    adapter.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(raised) == 1


def test_a_rate_strikes_its_share_and_the_same_ones_again() -> None:
    struck = []
    for seed in (1, 1, 2):
        with mock(faults=("store full rate=0.3",), seed=seed) as adapter:
            struck.append(
                [n for n in range(500) if material.store(adapter, material.key(n), b"x").result is Result.FULL]
            )
    assert struck[0] == struck[1] != struck[2]
    assert 100 < len(struck[0]) < 200


def test_a_script_skips_strikes_and_stops() -> None:
    with mock(faults=("store full skip=2 count=3", "store error skip=4 count=1")) as adapter:
        found = [material.store(adapter, material.key(n), b"x").result for n in range(12)]
    done, full, failed = Result.DONE, Result.FULL, Result.FAILED
    # The second rule is asked only about those that the first one lets through: 0, 1, 5, 6, and then 7.
    assert found == [done, done, full, full, full, done, done, failed, done, done, done, done]


def test_a_batch_fails_object_by_object(adapter: MockAdapter) -> None:
    adapter.set_faults("load error skip=1 count=1")
    targets = [bytearray(10_000) for _ in range(3)]
    items = [LoadItem(material.key(n), [memoryview(target)]) for n, target in enumerate(targets)]
    assert material.results(adapter.load(items, material.soon())) == [Result.DONE, Result.FAILED, Result.DONE]
    assert bytes(targets[2]) == material.content(2, 10_000)


# --- the control file -----------------------------------------------------------------------------------------
def test_the_file_replaces_the_rules_while_it_exists(tmp_path: Path) -> None:
    control = tmp_path / "control"
    with mock(control=control, faults=("store full",)) as adapter:
        assert material.store(adapter, b"k", b"x").result is Result.FULL
        assert main(["mock", str(control), "store error", "load hang"]) == 0
        assert material.store(adapter, b"k", b"x").result is Result.FAILED
        assert main(["mock", str(control), "--heal"]) == 0
        assert material.store(adapter, b"k", b"x").result is Result.DONE
        control.unlink()
        assert material.store(adapter, b"k", b"x").result is Result.FULL


def test_a_hang_ends_when_the_file_says_so(tmp_path: Path) -> None:
    control = tmp_path / "control"
    write_rules(control, [])
    with mock(control=control) as adapter:
        material.store(adapter, b"k", b"x")
        main(["mock", str(control), "any hang"])
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.extend(adapter.exists([b"k"], material.soon())), daemon=True)
        thread.start()
        main(["mock", str(control), "--heal"])
        thread.join(60)
        assert found == [True]


def test_a_file_that_is_not_understood_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    control = tmp_path / "control"
    with mock(control=control, faults=("store full",)) as adapter:
        control.write_text("# a comment\nstore fulll\n")
        assert material.store(adapter, b"k", b"x").result is Result.FULL
    assert f"{control}:2" in caplog.text


def test_the_command_shows_adds_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control = tmp_path / "control"
    assert main(["mock", str(control)]) == 0
    assert "no faults" in capsys.readouterr().out
    assert main(["mock", str(control), "store full rate=0.5 skip=3"]) == 0
    assert main(["mock", str(control), "any slow s=2", "--add"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["store full rate=0.5 skip=3", "any slow s=2"]
    for wrong in (["store exploded"], ["load full"], ["any slow s=soon"], ["any error rate=2"], ["--add"], ["any"]):
        assert main(["mock", str(control), *wrong]) == 2, wrong
    assert main(["mock", str(control), "any gone", "--heal"]) == 2
    assert len(control.read_text().splitlines()) == 2


# --- settings and check ---------------------------------------------------------------------------------------
def test_settings_refuse_a_rule_that_is_none() -> None:
    with pytest.raises(ValidationError, match="explode"):
        MockSettings(faults=("store explode",))
    with pytest.raises(ValidationError, match="absolute"):
        MockSettings(control=Path("control"))


def test_bandwidth_is_shared_by_all_calls() -> None:
    with mock(bandwidth_bytes_s=1 << 20) as adapter:
        began = time.monotonic()
        for number in range(3):
            material.store(adapter, material.key(number), bytes(1 << 16))
        assert time.monotonic() - began >= 3 / 16


def test_check_says_what_is_in_force_and_what_to_mend(tmp_path: Path) -> None:
    assert [each.message for each in mock(faults=("any gone",)).check(material.soon())][-1].endswith("any gone")
    control = tmp_path / "control"
    control.write_text("any nonsense\n")
    for path, cure in ((control, "correct the line"), (tmp_path / "no" / "control", "move l2.mock.control")):
        with pytest.raises(TierError) as raised:
            list(mock(control=path).check(material.soon()))
        assert cure in raised.value.cure
