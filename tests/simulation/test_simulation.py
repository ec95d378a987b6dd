"""The simulation is worth what it finds: planted faults are found, a finding replays, and a seed is a schedule."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
PLANTED = [
    fault
    for name in ("sim_faults.py", "sim_tier_faults.py")
    for fault in re.findall(r"^def (\w+)\(\) -> None:", RUN.with_name(name).read_text(), re.MULTILINE)
]
SCHEDULES = 600


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def planted() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """What is found with each of the faults, by as many processes as there are cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {
            fault: pool.submit(simulate, "--schedules", str(SCHEDULES), "--no-shrink", "--plant", fault)
            for fault in PLANTED
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", PLANTED)
def test_the_simulation_finds_planted_faults(
    fault: str, planted: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    found = planted[fault].result()
    assert found.returncode == 1, f"{fault} was not found: {found.stdout}"
    assert "Broken: " in found.stdout, found.stdout + found.stderr


def test_a_finding_is_made_short_and_replays() -> None:
    fault = "promises_never_expire"
    found = simulate("--schedules", str(SCHEDULES), "--plant", fault)
    schedule = re.search(r"--replay (\d+:[\d,]+)", found.stdout)
    assert schedule is not None, found.stdout + found.stderr
    again = simulate("--replay", schedule[1], "--trace", "--plant", fault)
    assert again.returncode == 1
    assert "outlived its time" in again.stdout
    assert again.stdout.count("Step(") < 20, "a promise that is made and forgotten takes a few of the steps"
    assert simulate("--replay", schedule[1]).returncode == 0, "without the fault nothing is found"


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    first, second = (simulate("--schedules", "25", "--first", "1000") for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    digest = re.search(r"digest \w+", first.stdout)
    assert digest is not None
    assert digest[0] in second.stdout
