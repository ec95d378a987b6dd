"""One host writes and another reads: LMCache, SGLang's storage classes and vLLM's tiering manager over one directory.

They agree on what a block is called where they are told to (`block_format`, `model`) and where their hashes and bytes
are the same. Here the tests see to both; in production LMCache must be configured with vLLM's hash and chunk size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytest.importorskip("lmcache.lmcache_native", reason="LMCache is not installed here")
import lmcache_host
import sglang_host
import vllm_host

SHARED = {"model": "shared", "block_format": "16 tokens, 2 layers, as all of them have it"}
NUMBERS = range(4)


def settings(path: Path) -> dict[str, Any]:
    return {"tier": {"type": "fs", "path": str(path)}, **SHARED}


def lmcache_writes(values: dict[str, Any]) -> None:
    with lmcache_host.lmcache_over(lmcache_host.adapter_config(values)) as host:
        host.store(NUMBERS)


def lmcache_reads(values: dict[str, Any]) -> list[bytes]:
    with lmcache_host.lmcache_over(lmcache_host.adapter_config(values)) as host:
        return [each.numpy().tobytes() for each in host.read(NUMBERS)]


def vllm_writes(values: dict[str, Any]) -> None:
    with vllm_host.vllm_over(vllm_host.hosted(**values)) as host:
        host.store(NUMBERS)


def vllm_reads(values: dict[str, Any]) -> list[bytes]:
    with vllm_host.vllm_over(vllm_host.hosted(**values)) as host:
        return list(host.read(NUMBERS).values())


class LargePool(sglang_host.PagePool):
    """Pages as large as the blocks of the others."""

    def __init__(self) -> None:
        super().__init__(pages=1)
        self.pages = self.pages.new_zeros((8, vllm_host.CHUNK_BYTES // self.dtype.itemsize))


def sglang_writes(values: dict[str, Any]) -> None:
    import torch

    pages = [bytearray(vllm_host.content(number)) for number in NUMBERS]
    tensors = [torch.frombuffer(each, dtype=torch.bfloat16) for each in pages]
    with closing(sglang_host.backend(values, LargePool())) as held:
        assert held.batch_set([sglang_host.key(number) for number in NUMBERS], tensors)


def sglang_reads(values: dict[str, Any]) -> list[bytes]:
    import torch

    pool = LargePool()
    with closing(sglang_host.backend(values, pool)) as held:
        targets = [pool.get_dummy_flat_data_page() for _ in NUMBERS]
        read = held.batch_get([sglang_host.key(number) for number in NUMBERS], targets)
    return [each.view(torch.uint8).numpy().tobytes() for each in read if each is not None]


Write, Read = Callable[[dict[str, Any]], None], Callable[[dict[str, Any]], list[bytes]]
WRITERS: dict[str, Write] = {"lmcache": lmcache_writes, "sglang": sglang_writes, "vllm": vllm_writes}
READERS: dict[str, Read] = {"lmcache": lmcache_reads, "sglang": sglang_reads, "vllm": vllm_reads}
PAIRS = [(writer, reader) for writer in WRITERS for reader in READERS if writer != reader]


def need(*hosts: str) -> None:
    if "sglang" in hosts and sglang_host.wheel() is None:
        pytest.skip("LMCACHE_CORE_SGLANG_WHEEL names no wheel of SGLang 0.5.23")


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_what_one_host_wrote_another_reads(writer: str, reader: str, tmp_path: Path) -> None:
    need(writer, reader)
    WRITERS[writer](settings(tmp_path))
    assert READERS[reader](settings(tmp_path)) == [vllm_host.content(number) for number in NUMBERS]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_hosts_that_were_not_told_to_share_do_not(writer: str, reader: str, tmp_path: Path) -> None:
    need(writer, reader)
    alone = {"tier": {"type": "fs", "path": str(tmp_path)}, "model": "shared"}
    WRITERS[writer](alone)
    assert READERS[reader](alone) == []
