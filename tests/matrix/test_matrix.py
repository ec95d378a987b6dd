"""The same claims for every backend, through a real server on a real service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from matrix_world import KEYS, TIER, World, until

from ..conftest import Node

if TYPE_CHECKING:
    from services.proxy import Proxies
    from services.service import Service

Make = Callable[..., World]


@pytest.mark.parametrize(("nbytes", "count"), [(64 << 10, 64), (1 << 20, 6)], ids=["64KiB", "1MiB"])
def test_what_left_l1_comes_back_from_the_tier(world: Make, nbytes: int, count: int) -> None:
    here = world(nbytes=nbytes)
    for first in (0, count):
        assert here.read(here.stored_and_forgotten(first, count)) == count
    assert here.read(range(2 * count)) == 2 * count
    assert here.read(range(1000, 1008)) == 0, "hits for what nobody stored"


def test_another_server_finds_what_the_first_stored(
    world: Make, node: Node, service: Service, label: str, tmp_path: Path
) -> None:
    if not service.shared:
        pytest.skip(f"one server at a time uses {service.name}")
    here = world()
    numbers = here.stored_and_forgotten(0)
    with ExitStack() as stack:
        other = type(node)(tmp_path / "other", stack)
        stack.callback(lambda: other.shm.unlink(missing_ok=True))
        other.serve(*service.tier_options(TIER))
        there = World(other.client(), label)
        assert there.read(numbers) == KEYS
        there.stored_and_forgotten(KEYS)
    assert here.read(range(2 * KEYS)) == 2 * KEYS


def test_a_cleared_namespace_stays_cleared(world: Make) -> None:
    here = world()
    numbers = here.stored_and_forgotten(0)
    here.client.clear(here.namespace, tiers=True)
    assert here.read(numbers) == 0
    here.recover(KEYS)


# --- a bad line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["delay", "reset", "truncate", "black hole"])
def test_a_bad_line_gives_misses_and_recovers(world: Make, proxies: Proxies, fault: str) -> None:
    here = world(proxies.settings)
    numbers = here.stored_and_forgotten(0)
    if fault == "delay":
        proxies.delay(0.002)
        assert here.read(numbers, wait_s=30.0) == KEYS, "slow is not broken"
        proxies.mend()
    elif fault == "black hole":
        proxies.swallow()
        assert here.read(numbers, wait_s=1.0) == 0
        here.store(KEYS)
        until(lambda: "time" in here.tier["last_error"] or "late" in json.dumps(here.tier), "the tier to be late")
        proxies.mend()
    else:
        # In the middle of an object (some services give each a connection of its own), over and over: retries alone
        # must not hide it from the test.
        proxies.cut_after(200_000, reset=fault == "reset", times=4)
        assert 0 <= here.read(numbers) <= KEYS
        assert proxies.cuts, "nothing was cut"
        proxies.mend()
    here.recover(2 * KEYS)
    here.account()


def test_a_line_that_breaks_under_load_never_gives_wrong_bytes(world: Make, proxies: Proxies) -> None:
    here = world(proxies.settings)
    numbers = here.stored_and_forgotten(0)
    for turn in range(6):
        proxies.cut_after(100_000 * (turn + 1), reset=bool(turn % 2), times=3)
        here.store(KEYS * (turn + 1), 4)
        here.read(numbers)
        here.client.clear(here.namespace)
    proxies.mend()
    here.recover(100 * KEYS)


# --- a service that dies ------------------------------------------------------------------------------------


def test_a_service_killed_in_the_middle_of_a_batch_is_used_again_once_it_is_back(world: Make, service: Service) -> None:
    if not service.restartable or not service.ours:
        pytest.skip(f"{service.name} cannot be killed and started again")
    here = world()
    numbers = here.stored_and_forgotten(0)
    reading = threading.Thread(target=lambda: [here.read(numbers) for _ in range(3)])
    here.store(KEYS)
    reading.start()
    service.kill()
    try:
        reading.join()
        here.client.clear(here.namespace)
        assert here.read(numbers, wait_s=2.0) == 0
        until(lambda: here.tier["last_error"], "an error to be told")
    finally:
        service.restart()
    here.recover(2 * KEYS)
    here.account()


# --- secrets ------------------------------------------------------------------------------------------------


SECRET = "s3cret/of@this:test"
QUOTED = "s3cret%2Fof%40this%3Atest"

# Every setting that may hold a secret, beside those that the service itself needs.
SECRET_SETTINGS: dict[str, dict[str, object]] = {
    "s3": {
        "access_key_id": "somebody",
        "secret_access_key": SECRET,
        "session_token": SECRET,
        "proxy": f"http://user:{QUOTED}@127.0.0.1:9",
    },
    "redis": {
        "url": f"redis://user:{QUOTED}@127.0.0.1:9/0",
        "password": SECRET,
        "sentinel_username": "user",
        "sentinel_password": SECRET,
    },
}


def test_no_secret_appears_in_output_logs_or_status(world: Make, node: Any, service: Service) -> None:
    if service.tier_type not in SECRET_SETTINGS:
        pytest.skip(f"{service.name} has no secret")
    secrets = {*service.secrets(), SECRET, QUOTED}
    wrong = {**service.adapter_settings(), **SECRET_SETTINGS[service.tier_type]}
    told = [_said("plugins", "show", service.tier_type)]
    for settings in (service.adapter_settings(), wrong):
        here = world(settings)
        if settings is wrong:
            here.store(0, 2)
            until(lambda tier=here: tier.tier["last_error"], "an error")
            here.read(range(100, 102), wait_s=1.0)
        else:
            here.recover(0)
        told += [json.dumps(here.status(), default=str), json.dumps(here.client.tiers_list(), default=str)]
        told += [_said(command, *service.tier_options(TIER, settings)) for command in ("check", "config")]
        told.append(_said("status", "--all", "--name", node.server.name, "--runtime_dir", str(node.run)))
        node.server.signal(15)
        until(lambda: node.server.popen.poll() is not None, "the server's end")
        told += [node.server.popen.stdout.read(), node.server.popen.stderr.read()]
    for text in told:
        for secret in secrets:
            assert secret not in text, f"a secret was told: …{text[max(0, text.find(secret) - 200) :][:400]}"


def _said(*words: str) -> str:
    """Everything that a command prints, whatever its status."""
    argv = [sys.executable, "-m", "lmcache_core.cli.main", *words]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, "NO_COLOR": "1"})
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran.stdout + ran.stderr
