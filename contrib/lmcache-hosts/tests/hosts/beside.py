"""Our disk tier beside a host's own disk backend, both through the host's interface, in one run.

    python beside.py lmcache|sglang|vllm FOLDER [ROUNDS]

Each round stores 64 objects of 1 MiB in batches of 16 and loads them back, with the two in turn (ours, theirs, theirs,
ours). Prints the medians in MiB/s, the processor's seconds for a GiB of both, and the ratios.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmcache_testing.host_backend import HostBackend, key

NBYTES, OBJECTS, BATCH = 1 << 20, 64, 16
HostBackend.NBYTES = NBYTES


def of_lmcache() -> tuple[Callable[[Path], HostBackend], Callable[[Path], HostBackend]]:
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

    from lmcache_hosts.lmcache_l2 import HostedL2Adapter
    from lmcache_hosts.reverse_lmcache import LMCacheBackend

    def theirs(path: Path) -> HostBackend:
        return LMCacheBackend(FSL2Adapter(FSL2AdapterConfig.from_dict({"type": "fs", "base_path": str(path)})))

    return lambda path: LMCacheBackend(HostedL2Adapter({"tier": tier(path)})), theirs


def of_sglang() -> tuple[Callable[[Path], HostBackend], Callable[[Path], HostBackend]]:
    import sglang_host
    import torch

    from lmcache_hosts.reverse_sglang import HiCacheBackend

    class Pool(sglang_host.PagePool):
        def __init__(self) -> None:
            super().__init__(pages=1, dtype=torch.uint8)
            self.pages = torch.zeros((1, NBYTES), dtype=torch.uint8)

    return (
        lambda path: HiCacheBackend(sglang_host.backend({"tier": tier(path)}, Pool())),
        lambda path: HiCacheBackend(sglang_host.backend({"file_storage_path": str(path)}, Pool(), name="file")),
    )


def of_vllm() -> tuple[Callable[[Path], HostBackend], Callable[[Path], HostBackend]]:
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm_host import hosted, spec

    from lmcache_hosts.reverse_vllm import SecondaryTierBackend

    def made(config: dict[str, Any]) -> HostBackend:
        return SecondaryTierBackend(lambda view: SecondaryTierFactory.create_secondary_tier(config, view, spec()))

    return lambda path: made(hosted(tier=tier(path))), lambda path: made({"type": "fs", "root_dir": str(path)})


def tier(path: Path) -> dict[str, Any]:
    return {"type": "fs", "path": str(path), "store_cpu_share": os.cpu_count() or 1}


def one_round(open_backend: Callable[[Path], HostBackend], path: Path) -> tuple[float, float, float]:
    """Seconds of the stores, of the loads, and of the processor for both."""
    names = [key(number) for number in range(OBJECTS)]
    page = os.urandom(NBYTES)
    held = {name: name + page[len(name) :] for name in names}
    batches = [names[at : at + BATCH] for at in range(0, OBJECTS, BATCH)]
    path.mkdir(parents=True)
    backend = open_backend(path)
    began, used = time.perf_counter(), time.process_time()
    for batch in batches:
        assert backend.store({name: held[name] for name in batch})
    stored = time.perf_counter()
    for batch in batches:
        assert backend.load(batch) == [held[name] for name in batch]
    loaded, used = time.perf_counter(), time.process_time() - used
    backend.close()
    shutil.rmtree(path)
    return stored - began, loaded - stored, used


def main(host: str, folder: str, rounds: str = "5") -> None:
    """Warm up once each, then the rounds."""
    ours, theirs = {"lmcache": of_lmcache, "sglang": of_sglang, "vllm": of_vllm}[host]()
    seen: dict[str, list[tuple[float, float, float]]] = {"ours": [], "theirs": []}
    sides = {"ours": ours, "theirs": theirs}
    for number in range(-1, int(rounds)):
        for at, side in enumerate(("ours", "theirs", "theirs", "ours")):
            figures = one_round(sides[side], Path(folder, f"{side}-{number}-{at}"))
            if number >= 0:
                seen[side].append(figures)
    middle = {side: [statistics.median(each) for each in zip(*found, strict=True)] for side, found in seen.items()}
    mib = OBJECTS * NBYTES / (1 << 20)
    for side, (store_s, load_s, cpu_s) in middle.items():
        figures = {"store_mib_s": mib / store_s, "load_mib_s": mib / load_s, "cpu_s_gib": cpu_s * 1024 / mib}
        print(side, json.dumps({name: round(value, 2) for name, value in figures.items()}))
    names = ("stores", "loads", "processor")
    ratios = {name: round(middle["theirs"][at] / middle["ours"][at], 2) for at, name in enumerate(names)}
    print("theirs / ours, time: above 1 is better for ours", json.dumps(ratios))


if __name__ == "__main__":
    main(*sys.argv[1:])
