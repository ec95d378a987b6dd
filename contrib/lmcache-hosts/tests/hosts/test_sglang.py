"""Our backend under SGLang's own storage classes: `nox -s "host(sglang)"`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed here")
import sglang_host
import torch
from sglang_host import PAGE_SIZE, PagePool, backend, content, key, same

from lmcache_core.errors import SettingsError
from lmcache_mock.control import write_rules
from lmcache_mock.drills.faults import FaultRule
from lmcache_testing.waiting import until

if TYPE_CHECKING:
    from lmcache_core.server.server import Server

if sglang_host.wheel() is None:
    pytest.skip("LMCACHE_CORE_SGLANG_WHEEL names no wheel of SGLang 0.5.23", allow_module_level=True)

storage = sglang_host.import_storage()
HASTY = {"lookup_s": 0.3, "load_s": 0.3, "store_s": 0.3}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def one(extra: dict[str, Any] | None = None, **more: Any) -> Any:
        made.append(backend(extra or {"tier": {"type": "fs", "path": str(tmp_path / "tier")}}, **more))
        return made[-1]

    yield one
    for each in made:
        each.close()


def mock(path: Path) -> dict[str, Any]:
    return {"tier": {"type": "mock", "control": str(path / "faults")}, **HASTY}


def faults(path: Path, *rules: str) -> None:
    write_rules(path / "faults", [FaultRule.parse(rule) for rule in rules])


def keys(count: int) -> list[str]:
    return [key(number) for number in range(count)]


def filled(held: Any, count: int) -> None:
    assert held.batch_set(keys(count), [content(number) for number in range(count)])


def pages(held: Any, count: int) -> list[torch.Tensor | None]:
    pool = PagePool()
    read: list[torch.Tensor | None] = held.batch_get(
        keys(count), [pool.get_dummy_flat_data_page() for _ in range(count)]
    )
    return read


def test_pages_that_were_set_are_found_and_got(make: Callable[..., Any]) -> None:
    held = make()
    filled(held, 8)
    assert held.batch_exists(keys(10)) == 8
    assert held.exists(key(7))
    assert not held.exists(key(8))
    read = pages(held, 10)
    assert all(same(page, number) for number, page in enumerate(read[:8]))
    assert read[8:] == [None, None]


def test_the_next_process_finds_them_and_another_rank_model_or_dtype_does_not(make: Callable[..., Any]) -> None:
    first = make()
    filled(first, 2)
    first.close()
    assert make().batch_exists(keys(2)) == 2
    assert make(tp_rank=1, tp_size=2).batch_exists(keys(2)) == 0
    assert make(model_name="other").batch_exists(keys(2)) == 0
    assert make(pool=PagePool(dtype=torch.float16)).batch_exists(keys(2)) == 0


def test_kv_that_is_equal_on_all_ranks_is_one_object(make: Callable[..., Any]) -> None:
    filled(make(is_mla_model=True, tp_rank=0, tp_size=4), 2)
    assert make(is_mla_model=True, tp_rank=3, tp_size=4).batch_exists(keys(2)) == 2


def test_pages_go_between_the_pool_and_the_tier(make: Callable[..., Any]) -> None:
    pool, other = PagePool(), PagePool()
    held, later = make(pool=pool), make(pool=other)
    for number in range(4):
        pool.pages[number] = content(number)
    indices = torch.arange(4 * PAGE_SIZE)
    assert held.batch_set_v1(keys(4), indices) == [True] * 4
    assert later.batch_get_v1(keys(5), torch.arange(8 * PAGE_SIZE, 13 * PAGE_SIZE)) == [True] * 4 + [False]
    assert all(same(other.pages[8 + number], number) for number in range(4))
    assert held.batch_get_v1(keys(4), indices[:-1]) == [False] * 4


def test_several_pools_are_matched_by_their_policies(make: Callable[..., Any]) -> None:
    held, kv, state = make(), PagePool(), PagePool()
    held.register_mem_host_pool_v2(kv, storage.PoolName.KV)
    held.register_mem_host_pool_v2(state, storage.PoolName.MAMBA)

    def transfer(name: Any, numbers: list[int], policy: str = "all_pages") -> Any:
        indices = torch.cat([torch.arange(number * PAGE_SIZE, (number + 1) * PAGE_SIZE) for number in numbers])
        wanted = [key(number) for number in numbers]
        return storage.PoolTransfer(name, indices, keys=wanted, hit_policy=storage.PoolHitPolicy(policy))

    for number in range(6):
        kv.pages[number] = state.pages[number] = content(number)
    mamba = storage.PoolName.MAMBA
    stored = held.batch_set_v2([transfer(storage.PoolName.KV, [0, 1, 2, 3, 4]), transfer(mamba, [1, 3])])
    assert stored == {"kv": [True] * 5, "mamba": [True] * 2}
    found = held.batch_exists_v2(keys(6), [transfer(mamba, [0], "trailing_pages")])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
    assert held.batch_exists_v2(keys(6), [transfer(mamba, [0])]).kv_hit_pages == 0
    assert held.batch_exists_v2(keys(6)).kv_hit_pages == 5
    state.pages.zero_()
    assert held.batch_get_v2([transfer(mamba, [1, 2, 3])]) == {"mamba": [True, False, True]}
    assert same(state.pages[3], 3)
    assert held.batch_get_v2([transfer(storage.PoolName.SWA, [1])]) == {"swa": [False]}


@pytest.mark.parametrize("fault", ["flipped_bits", "short_read", "neighbour", "error", "gone", "hang"])
def test_a_failed_load_is_none_and_sglang_goes_on(make: Callable[..., Any], tmp_path: Path, fault: str) -> None:
    held = make(mock(tmp_path))
    filled(held, 4)
    faults(tmp_path, f"load {fault}")
    assert held.batch_get(keys(4)[1:], [PagePool().get_dummy_flat_data_page() for _ in range(3)]) == [None] * 3
    faults(tmp_path)
    until(lambda: same(pages(held, 1)[0], 0), "the tier to be used again")


def test_a_medium_that_hangs_does_not_hang_sglang(make: Callable[..., Any], tmp_path: Path) -> None:
    held = make(mock(tmp_path))
    filled(held, 2)
    faults(tmp_path, "any hang")
    assert not held.batch_set([key(7)], [content(7)])
    assert held.batch_exists(keys(2)) == 0
    assert pages(held, 2) == [None, None]


def test_clear_takes_away_what_this_backend_keeps(make: Callable[..., Any]) -> None:
    held, other = make(), make(model_name="other")
    filled(held, 3)
    filled(other, 3)
    until(held.clear, "the medium to be listed")
    assert held.batch_exists(keys(3)) == 0
    assert other.batch_exists(keys(3)) == 3


def test_a_key_in_another_spelling_is_another_key(make: Callable[..., Any]) -> None:
    held = make()
    filled(held, 2)
    for other in (key(1).upper(), f" {key(1)}", f"{key(1)[:32]} {key(1)[32:]}"):
        assert not held.exists(other)
        assert held.get(other, PagePool().get_dummy_flat_data_page()) is None
    assert held.exists(key(1))


def test_before_a_pool_is_registered_all_is_a_miss(make: Callable[..., Any]) -> None:
    held = importlib.import_module("lmcache_hosts.sglang_hicache").HostedHiCache(
        storage.HiCacheStorageConfig(
            0, 1, 0, 1, 0, 1, False, False, True, "model", extra_config={"tier": {"type": "mock"}}
        )
    )
    assert not held.set(key(1), content(1))
    assert not held.exists(key(1))
    assert held.get(key(1), PagePool().get_dummy_flat_data_page()) is None
    held.close()


def test_sglangs_own_failure_wrapper_goes_around_it(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "1.0")
    held = make()
    assert type(held).__name__ == "HiCacheStorageFailureInjector"
    assert not held.batch_set([key(1)], [content(1)])
    monkeypatch.delenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE")


def test_two_sglangs_share_the_pool_of_our_server(make: Callable[..., Any], start: Callable[..., Server]) -> None:
    settings = start(l1={"size_bytes": "64MiB"}).parts.settings
    server = {"server": {"name": settings.name, "runtime_dir": str(settings.runtime_dir)}}
    one, other = make(server), make(server)
    until(lambda: one.batch_set(keys(4), [content(number) for number in range(4)]), "the first to be connected")
    until(lambda: other.batch_exists(keys(4)) == 4, "the other to be connected")
    assert all(same(page, number) for number, page in enumerate(pages(other, 4)))


def test_another_interface_is_refused_with_a_cure() -> None:
    class Changed(storage.HiCacheStorage):  # type: ignore[misc]
        def batch_get(self, keys: Any) -> Any:
            return keys

    ours = importlib.import_module("lmcache_hosts.sglang_hicache")
    with pytest.raises(SettingsError, match=r"batch_get\(\) takes keys, not .*install SGLang 0\.5\.23"):
        ours.INTERFACE.check(Changed, ours.HostedHiCache)


def test_wrong_settings_are_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="known settings"):
        make({"tiers": {"type": "fs", "path": str(tmp_path)}})
