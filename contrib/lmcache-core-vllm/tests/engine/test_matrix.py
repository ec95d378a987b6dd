"""Every way of loading crossed with every place that KV comes from, while the same steps save: answers equal those
without a cache. `nox -s vllm -- all` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_redis import redis_server
from vllm_engines import Engine, Server, is_written, prompt, until

from lmcache_testing.embedded import Json

pytestmark = pytest.mark.slow
BLOCK = 128
STEPS = {"in steps of 256 tokens": 256, "prompts in one step": 4096}


@pytest.fixture(scope="module")
def plain(start: Callable[..., Engine], llama: Path) -> Engine:
    return start(llama, enable_prefix_caching=False)


@pytest.fixture(scope="module", params=["pool", "disk", "redis"])
def medium(
    request: pytest.FixtureRequest, serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    folder = tmp_path_factory.mktemp("medium")
    with ExitStack() as stack:
        options: tuple[str, ...] = ()
        if request.param == "disk":
            options = ("--l2.disk.type", "fs", "--l2.disk.path", str(folder))
        elif request.param == "redis":
            if find_spec("lmcache_redis") is None:
                pytest.skip("lmcache-redis is not installed here")
            port = stack.enter_context(redis_server(folder))
            options = ("--l2.shared.type", "redis", "--l2.shared.url", f"redis://127.0.0.1:{port}/0")
        yield request.param, serve(*options)


def equal(plain: Engine, cached: Engine, prompts: list[list[int]]) -> list[int]:
    """How much of each came from a cache; the answers are those without one."""
    expected, found = plain.generate(*prompts), cached.generate(*prompts)
    assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
    return [each["cached"] for each in found]


@pytest.mark.parametrize("own_cache", [True, False], ids=["own cache", "no own cache"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("load", ["async", "sync"])
def test_loads_and_saves_of_the_same_steps(
    load: str,
    steps: str,
    own_cache: bool,
    medium: tuple[str, Server],
    plain: Engine,
    start: Callable[..., Engine],
    llama: Path,
) -> None:
    where, server = medium
    salt = f"{load} {steps} {own_cache}"
    options: Json = {"max_num_batched_tokens": STEPS[steps], "enable_prefix_caching": own_cache}
    cached = start(llama, server.settings(load=load, salt=salt), **options)
    first = [prompt(100 + number, 500 + 100 * number) for number in range(3)]
    second = [each + prompt(200 + number, 300) for number, each in enumerate(first)]

    def again(prompts: list[list[int]]) -> list[int]:
        cached.saved()
        if own_cache:
            cached.forget()
        if where != "pool":
            with server.client() as client:
                until(lambda: is_written(client.status()["tiers"]["stores"]))
                client.clear()  # of the pool
        return equal(plain, cached, prompts)

    assert equal(plain, cached, first) == [0, 0, 0]
    # Each loads its beginning and saves its end, beside one that is all new.
    assert again([*second, prompt(300, 700)]) == [len(each) // BLOCK * BLOCK for each in first] + [0]
    assert again(second) == [(len(each) - 1) // BLOCK * BLOCK for each in second]
    figures: Json = cached.figures()
    assert "load_failed_blocks" not in figures
    cached.end()
