"""A zygote for `test_promotion.py`: forks servers and workers that have everything imported, to be killed any moment.

Run as a script; it takes a line for each wish and answers with one. `server NAME RUN`, `writer NAME RUN NUMBER` and
`reader NAME RUN NUMBER` fork a child and answer its pid; `kill PID` sends SIGKILL, waits for its end, answers `gone`.

Each writer has a cache of its own, and clears it and fills it anew again and again, with values that carry a growing
generation. Once a clear has been answered, no generation before it may be read by anybody: the writer says so in
`floors`, one word a cache in a file that all map. A reader takes the floor, reads, and compares.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

from lmcache_l0 import ServedCache

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import CacheError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings

CACHES = 3
KEYS = 12
READERS = 2
FLOOR, CLEARS, READ = 0, 1, 2  # of a cache's words; from READ on two a reader: how often it read in L0, and in L1
WORDS = READ + 2 * READERS


def words_of(run: Path) -> memoryview:
    """The floors and counts, u64 each."""
    with (run / "words").open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8 * WORDS * CACHES)).cast("Q")


def value_of(number: int, generation: int) -> bytes:
    """Of one size in one generation and another in the next; every part says whose it is."""
    return struct.pack("<QQ", number, generation) * (4 + 8 * (generation % 3))


def serve(name: str, run: Path) -> None:
    settings = make_settings(
        name=name,
        runtime_dir=str(run),
        state_dir=str(run / "state"),
        l1={"size_bytes": 8 << 20},
        l0={"enabled": True, "hash_slots": 64, "max_value_size": 512, "promote_after": 1, "folder": str(run)},
    )
    server = Server(settings, load_plugins())
    (run / "table").write_text(str(server.parts.companions.offers()["l0"]["path"]))
    server.run()


def write(name: str, run: Path, number: int) -> None:
    words = words_of(run)
    client = Client.connect(name, runtime_dir=run, client_name=f"writer {number}", use_index=bool(number % 2))
    cache = ServedCache(client, f"cache {number}")
    chance = random.Random()
    while True:
        try:
            cache.clear()
        except CacheError:  # no server just now, and no answer: nothing is promised
            time.sleep(0.005)
            continue
        words[WORDS * number + FLOOR] += 1  # its one writer
        words[WORDS * number + CLEARS] += 1
        generation = words[WORDS * number + FLOOR]
        for key in range(KEYS):
            value = value_of(key, generation)
            if cache.set(f"{key}", value) is Status.STORED and chance.random() < 0.5:
                cache.get(f"{key}")
        time.sleep(chance.random() * 0.02)


def read(name: str, run: Path, number: int) -> None:
    words = words_of(run)
    client = Client.connect(name, runtime_dir=run, client_name=f"reader {number}", use_index=bool(number % 2))
    caches = [ServedCache(client, f"cache {each}") for each in range(CACHES)]
    chance = random.Random()
    while True:
        which, key = chance.randrange(CACHES), chance.randrange(KEYS)
        cache, floor = caches[which], words[WORDS * which + FLOOR]
        hits = 0 if cache.l0 is None else cache.l0.hits
        value = cache.get(f"{key}")
        if value is None:
            continue
        generation = struct.unpack_from("<Q", value, 8)[0]
        above = cache.l0 is not None and cache.l0.hits > hits
        where = "L0" if above else "L1"
        assert value == value_of(key, generation), f"{where} gave parts of several values for {which}:{key}: {value!r}"
        assert generation >= floor, f"{where} gave {generation} for {which}:{key} when {floor} had been promised"
        words[WORDS * which + READ + 2 * number + (not above)] += 1  # its one reader


def guarded(run: Path, work: object, *arguments: object) -> None:
    try:
        work(*arguments)  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001 - the tester is to see any
        (run / f"failed-{os.getpid()}").write_text(repr(error))
    os._exit(3)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(CacheError):  # what is imported late is imported now
        Client.connect("nobody", runtime_dir="/nonexistent").status()
    works = {"server": serve, "writer": write, "reader": read}
    for line in sys.stdin:
        wish, *words = line.split()
        if wish == "kill":
            os.kill(int(words[0]), signal.SIGKILL)
            os.waitpid(int(words[0]), 0)
            print("gone", flush=True)
            continue
        child = os.fork()
        if child == 0:
            os.close(0)
            os.dup2(2, 1)
            guarded(Path(words[1]), works[wish], words[0], Path(words[1]), *map(int, words[2:]))
        print(child, flush=True)


if __name__ == "__main__":
    main()
