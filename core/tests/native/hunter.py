"""One process of the torn-read hunt over a real server: `hunter.py ROLE NAME RUNTIME_DIR COUNT [EXTENSION]`.

`store` stores batches of objects of all sizes, under keys of which far more are in use than fit: each batch evicts
others. `read` retrieves batches by the index, without any lease, until its standard input ends, and checks every byte
of every hit. It prints how many it saw of each size; status 3: one of them was not whole, or of another key. `pages`
does the same into pages, and checks as well that a page of a key that was no hit is as it was, or reported.

EXTENSION: the C extension to use instead of the installed one (for the negative control).
"""

from __future__ import annotations

import importlib.util
import os
import random
import select
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core.client.client import Client
    from lmcache_core.tokens.namespace import Namespace

SIZES = (64, 4096, 65536, 1 << 20)
KEYS = 40  # of each size; 1 MiB of them are more than the pool holds
POOL_BYTES = 24 << 20
BATCH = 6
TORN = 3


def take_extension(path: str) -> None:
    spec = importlib.util.spec_from_file_location("lmcache_core._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["lmcache_core._native"] = module


def key_of(size: int, number: int) -> bytes:
    return (size * KEYS + number).to_bytes(32, "little")


def payload_of(size: int, number: int, stamp: bytes) -> bytes:
    """Which key it belongs to, and then nothing but its stamp."""
    return key_of(size, number)[:8] + stamp * (SIZES[size] // 8 - 1)


def is_whole(data: bytearray, size: int, number: int) -> bool:
    return data[:8] == key_of(size, number)[:8] and data[8:] == data[8:16] * (SIZES[size] // 8 - 1)


def numbers_of(chance: random.Random) -> tuple[int, list[int]]:
    size = chance.choice((0, 1, 2, 3, 3, 3))  # the large ones are what takes time to copy
    return size, chance.sample(range(KEYS), BATCH)


class Paged:
    """Pages of one size of objects, two of each of four regions for an object, in no order."""

    REGIONS, PER_OBJECT, SENTINEL = 4, 2, b"\xee"

    def __init__(self, client: Client, space: Namespace) -> None:
        from lmcache_core.client.move.regions import PageGroup, Region

        self.page_bytes = space.layout.nbytes // (self.REGIONS * self.PER_OBJECT)
        count = BATCH * self.PER_OBJECT
        stride = self.REGIONS * self.page_bytes
        self.memory = bytearray(count * stride)
        regions = [
            Region(self.memory, at * self.page_bytes, self.page_bytes, stride, count) for at in range(self.REGIONS)
        ]
        self.pages = client.register_pages([PageGroup(space, regions, self.PER_OBJECT)])
        self.ids = list(range(count))

    def retrieve(self, keys: list[bytes], chance: random.Random) -> tuple[list[bytearray], list[Any]]:
        """What the pages of each key hold now, and the statuses. Raises where a page was written and nobody told."""
        chance.shuffle(self.ids)
        self.memory[:] = self.SENTINEL * len(self.memory)
        if chance.random() < 0.5:
            result = self.pages.retrieve([(0, keys, self.ids)])
        else:
            job = self.pages.retrieve_start([(0, keys, self.ids)], order=chance.choice(("region", "object")))
            assert job.wait(60.0)
            result = job.result
        objects = []
        for at, status in enumerate(result.statuses[0]):
            own = self.ids[at * self.PER_OBJECT : (at + 1) * self.PER_OBJECT]
            places = [
                (page * self.REGIONS + region) * self.page_bytes for region in range(self.REGIONS) for page in own
            ]
            parts = [self.memory[place : place + self.page_bytes] for place in places]
            objects.append(bytearray().join(parts))
            reported = set(own) & set(result.untrusted[0])
            if status == "hit":
                assert not reported, "a hit is reported as not to be trusted"
            elif not reported:
                assert objects[-1] == self.SENTINEL * len(objects[-1]), "a page was written, and nobody told of it"
        return objects, list(result.statuses[0])


def main() -> int:
    role, name, runtime_dir, count, *extension = sys.argv[1:]
    if extension:
        take_extension(extension[0])
    from lmcache_core.client.client import Client
    from lmcache_core.client.results import Status
    from lmcache_core.pool.layout import Layout
    from lmcache_core.tokens.namespace import Namespace

    spaces = [Namespace("hunt", Layout("uint8", (nbytes,))) for nbytes in SIZES]
    chance = random.Random(os.getpid())
    seen = dict.fromkeys(SIZES, 0)
    with Client.connect(name, runtime_dir=runtime_dir) as client:
        for space in spaces:
            assert client.register_layout(space)
        paged = [Paged(client, space) for space in spaces] if role == "pages" else []
        print("ready", flush=True)
        for _ in range(int(count)):
            size, numbers = numbers_of(chance)
            keys = [key_of(size, number) for number in numbers]
            if role == "store":
                objects = [payload_of(size, number, chance.randbytes(8)) for number in numbers]
                result = client.store(keys, objects, namespace=spaces[size])
                seen[SIZES[size]] += sum(status is Status.STORED for status in result.statuses)
                continue
            if select.select([sys.stdin], [], [], 0)[0] and all(seen.values()):
                break
            if role == "pages":
                into, statuses = paged[size].retrieve(keys, chance)
            else:
                into = [bytearray(SIZES[size]) for _ in keys]
                statuses = list(client.retrieve(keys, into, namespace=spaces[size], prefix=False).statuses)
            for number, data, status in zip(numbers, into, statuses, strict=True):
                if status is not Status.HIT:
                    continue
                if not is_whole(data, size, number):
                    print(f"torn: {number} of {SIZES[size]} bytes", flush=True)
                    return TORN
                seen[SIZES[size]] += 1
    print(*seen.values(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
