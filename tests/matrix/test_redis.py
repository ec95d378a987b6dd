"""What only Redis does: new primaries, moved slots, paused clients, evictions, rights."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from matrix_world import KEYS, TIER, World, until

if TYPE_CHECKING:
    from services.redis_standalone import RedisService

redis = pytest.importorskip("redis")  # other backends have no need of it

Make = Callable[..., World]
ONE_PORT = ("redis", "redis-tls")
FAILING_OVER = ("redis-sentinel", "redis-cluster")


@pytest.fixture(autouse=True)
def _only_ours(service: RedisService) -> None:
    if not service.ours:
        pytest.skip("these tests stop and configure the service: not with one of your own")


@contextmanager
def configured(door: redis.Redis, **values: object) -> Iterator[None]:
    """Settings of a server, and back."""
    names = {name.replace("_", "-"): value for name, value in values.items()}
    before = {name: door.config_get(name)[name] for name in names}
    for name, value in names.items():
        door.config_set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            door.config_set(name, value)


@pytest.mark.backends(*FAILING_OVER)
def test_a_primary_killed_under_load_is_replaced_and_hits_come_back(world: Make, service: RedisService) -> None:
    here = world()
    numbers = here.stored_and_forgotten(0)
    stop = threading.Event()
    wrong: list[BaseException] = []

    def load() -> None:
        first = KEYS
        try:
            while not stop.is_set():
                here.store(first, 4)
                here.read(numbers, wait_s=1.0)
                here.client.clear(here.namespace)
                first += 4
        except BaseException as error:  # noqa: BLE001 - of a thread: raised by the test
            wrong.append(error)

    busy = threading.Thread(target=load)
    busy.start()
    dead = service.kill_primary()
    try:
        until(lambda: here.round_trip(20_000_000), "a new primary, and hits")
    finally:
        stop.set()
        busy.join()
        dead.start()
        until(service.healthy, "the dead one to follow")
    assert wrong == []
    here.recover(10_000_000)
    here.account()


@pytest.mark.backends("redis-cluster")
def test_slots_that_move_are_followed(world: Make, service: RedisService) -> None:
    """MOVED, and ASK while a slot is on its way."""
    here = world()
    numbers = here.stored_and_forgotten(0)
    source, target = service.primaries()[:2]
    with source.door() as giver, target.door() as taker:
        to, at = taker.execute_command("CLUSTER", "MYID").decode(), giver.execute_command("CLUSTER", "MYID").decode()
        names = [name for name in giver.scan_iter() if name.startswith(b"lmcache:")]
        assert names, "the source holds none of the objects"
        slots = sorted({giver.execute_command("CLUSTER", "KEYSLOT", name) for name in names})
        for slot in slots:
            taker.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", at)
            giver.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", to)
        moved = names[: max(1, len(names) // 2)]
        for name in moved:
            giver.execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
        assert here.read(numbers) == KEYS, "half of the objects are asked for elsewhere"
        here.client.clear(here.namespace)
        for name in names[len(moved) :]:
            giver.execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
        for slot in slots:
            for door in (taker, giver):
                door.execute_command("CLUSTER", "SETSLOT", slot, "NODE", to)
    assert here.read(numbers) == KEYS, "the slots have moved for good"
    here.recover(KEYS)


@pytest.mark.backends(*ONE_PORT)
def test_paused_clients_are_late_and_then_served(world: Make, service: RedisService) -> None:
    here = world()
    numbers = here.stored_and_forgotten(0)
    with service.door() as door:
        door.client_pause(1500)
    assert here.read(numbers, wait_s=0.3) == 0
    here.recover(KEYS)
    assert here.read(numbers) == KEYS


@pytest.mark.backends(*ONE_PORT)
def test_a_server_that_stands_still_is_given_up_in_time(world: Make, service: RedisService) -> None:
    here = world()
    numbers = here.stored_and_forgotten(0)
    service.server.daemon.signal(signal.SIGSTOP)
    try:
        assert here.read(numbers, wait_s=0.3) == 0
        here.store(KEYS)
        assert here.client.ping(b"still") == b"still"
    finally:
        service.server.daemon.signal(signal.SIGCONT)
    here.recover(2 * KEYS)
    here.account()


@pytest.mark.backends(*ONE_PORT)
def test_what_the_server_evicts_is_a_miss(world: Make, service: RedisService) -> None:
    here = world()
    with service.door() as door:
        before = set(door.scan_iter(match="lmcache:*"))
        numbers = here.stored_and_forgotten(0)
        ours = set(door.scan_iter(match="lmcache:*")) - before
        assert len(ours) == KEYS
        used = int(door.info("memory")["used_memory"])
        evicted = int(door.info("stats")["evicted_keys"])
        more = iter(range(KEYS, 1000 * KEYS, KEYS))
        newest = range(0)

        def one_of_ours_is_gone() -> bool:
            nonlocal newest
            newest = here.stored_and_forgotten(next(more))
            return int(door.info("stats")["evicted_keys"]) > evicted and door.exists(*ours) < KEYS

        with configured(door, maxmemory_policy="allkeys-lru", maxmemory=used):
            until(one_of_ours_is_gone, "an eviction")
            assert here.read(numbers) < KEYS
            assert here.read(newest) > 0, "the newest are gone"
    here.recover(2000 * KEYS)


@pytest.mark.backends(*ONE_PORT)
def test_a_full_server_stores_nothing_and_says_the_cure(world: Make, service: RedisService) -> None:
    here = world()
    numbers = here.stored_and_forgotten(0)
    with service.door() as door:
        with configured(door, maxmemory_policy="noeviction", maxmemory=1 << 20):
            here.store(KEYS)
            until(here.quiet, "the stores")
            assert "full" in json.dumps(here.tier)
            here.client.clear(here.namespace)
            assert here.read(numbers) == KEYS, "what is there can still be loaded"
    here.recover(2 * KEYS)


@pytest.mark.backends("redis-tls")
@pytest.mark.parametrize("wrong", ["password", "ca", "user"])
def test_a_refused_login_is_said_and_mended_at_the_server(world: Make, service: RedisService, wrong: str) -> None:
    settings = service.adapter_settings()
    value = {"password": "guessed", "ca": service.certificates.other_ca, "user": "nobody"}[wrong]
    settings[{"password": "password", "ca": "tls_ca", "user": "username"}[wrong]] = value
    here = world(settings)
    here.store(0, 2)
    error = until(lambda: here.tier["last_error"], "an error")
    assert TIER in error
    assert {"password": "set username and password", "user": "set username and password", "ca": "tls_ca"}[
        wrong
    ] in error
    assert here.read(range(100, 102), wait_s=1.0) == 0
    if wrong == "password":
        with service.door() as door:
            door.execute_command("ACL", "SETUSER", service.adapter_settings()["username"], ">guessed")
            try:
                here.recover(KEYS)
            finally:
                door.execute_command("ACL", "SETUSER", service.adapter_settings()["username"], "<guessed")


@pytest.mark.backends("redis-tls")
def test_a_user_without_a_command_is_told_which_rights_are_needed(world: Make, service: RedisService) -> None:
    here = world()
    user = service.adapter_settings()["username"]
    with service.door() as door:
        door.execute_command("ACL", "SETUSER", user, "-set")
        try:
            here.store(0, 2)
            error = until(lambda: here.tier["last_error"], "an error")
            assert "NOPERM" in error
            assert "+set" in error
        finally:
            door.execute_command("ACL", "SETUSER", user, "+set")
    here.recover(KEYS)
