"""Every field of every message, with values inside, at and beyond what it may have, in frames that are right otherwise.

`LMCACHE_COPIER_FRAMES=100000 pytest plugins/lmcache-copier/tests/test_fuzz.py` sends more of them."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import random
import socket
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from lmcache_copier import ServerPages, register_pages
from lmcache_copier import messages as m
from lmcache_copier.link import Mark
from lmcache_core.errors import CacheError, by_code
from lmcache_testing.waiting import until

from .copier_nodes import Node, group_of, keys
from .strangers import Stranger

FRAMES = int(os.environ.get("LMCACHE_COPIER_FRAMES", "2000"))
FRAME_BYTES = 1 << 20  # of lists in lists
PAGE, PAGES = 4096, 8
NUMBERS = [-(2**63), -(2**31), -2, -1, 0, 1, 7, 8, 9, 64, 65, 4095, 4097, 2**31, 2**32 - 1, 2**32, 2**40 - 1, 2**40]
NUMBERS += [2**56 - 1, 2**56, 2**63 - 1, 2**63, 2**64 - 1]
FLOATS = [math.nan, math.inf, -math.inf, -1.0, -0.0, 5e-324, 0.001, 600.0, 1e9, 1e308]
TEXTS = ["", "\0", "uint9", "float16", "KLTHD", "\x1b[2J", "é" * 40, "x" * 5000]
IDS = [each for each in NUMBERS if -(2**63) <= each < 2**63]
DECODER = msgspec.msgpack.Decoder(m.CopierRequest)


def memory() -> int:
    """Where eight pages are that nothing is near: what hostile numbers reach beyond them is nobody's."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype, call.argtypes = ctypes.c_size_t, [ctypes.c_size_t] * 2 + [ctypes.c_int] * 3 + [ctypes.c_size_t]
    wanted, fixed = 1 << 36, 0x100000
    there = call(wanted, PAGES * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, 0x22 | fixed, -1, 0)
    assert there == wanted, os.strerror(ctypes.get_errno())
    return int(there)


class Frames:
    """Right messages, in which some fields were replaced. Registration 1 is the sender's memory."""

    def __init__(self, rng: random.Random, start: int) -> None:
        self._rng = rng
        mark = Mark()
        self._kept = mark
        self._grown = False  # a value of this frame
        group = m.GroupOf(7, "uint8", [2 * PAGE], "", [m.RegionOf(0, 0, PAGE, PAGE, PAGES)], 2)
        own, mapped = (m.MemoryPiece(*at, False) for at in ((start, PAGES * PAGE, -1), (0, PAGES * PAGE, 0)))
        entry = m.JobEntry(0, b"".join(keys(2)), array("q", range(4)).tobytes())
        promised = msgspec.structs.replace(entry, promises=bytes(16))
        self.register = m.RegisterMemory(1, mark.at, mark.value, [own], [group])
        self._right = [
            self.register,
            m.RegisterMemory(1, mark.at, mark.value, [mapped], [group], 1),
            m.RegisterMemory(1, mark.at, mark.value, [mapped], [group], 0, bytes(16), [bytes(64)]),
            m.UnregisterMemory(2, 2),
            *[m.StorePages(3, 1, [entry], 5.0, told) for told in (False, True)],
            m.RetrievePages(4, 1, [entry, promised], 5.0, 1),
            m.RetrievePages(4, 1, [entry], None, 0, bytes(64)),
            m.CancelJob(3),
            m.MeasurePages(5, 1, 0, array("q", [0, 1]).tobytes()),
            m.AskAlive(6),
        ]

    def next(self) -> tuple[bytes, bool]:
        """A message, and whether a descriptor comes with it."""
        rng = self._rng
        while True:
            right, self._grown = rng.choice(self._right), False
            tree = msgspec.to_builtins(right, builtin_types=(bytes,))
            for holder, name in rng.choices(list(_places(tree)), k=rng.choice([0, 1, 1, 1, 2, 4])):
                holder[name] = self._replaced(holder[name], name)
            frame = msgspec.msgpack.encode(self._reshaped(tree) if rng.random() < 0.05 else tree)
            if len(frame) <= FRAME_BYTES and (rng.random() < 0.2 or is_right(frame)):
                return frame, isinstance(right, m.RegisterMemory) and right.files == 1

    def _replaced(self, value: Any, name: object) -> Any:
        rng = self._rng
        if rng.random() < 0.05:
            return rng.choice([None, True, -1, 2**64 - 1, math.nan, "", b"", [], {}, [[[]]]])
        match value:
            case bool():
                return not value
            case int():
                return rng.choice(NUMBERS)
            case float() | None:
                return rng.choice([*FLOATS, None])
            case str():
                return rng.choice(TEXTS)
            case bytes() if name in ("ids", "promises"):
                return array("q", rng.choices(IDS, k=rng.choice([0, 1, 4, 4, 4, 5]))).tobytes()
            case bytes():
                return rng.choice([value[:-1], value + b"x", self._many(value, 3000), rng.randbytes(len(value))])
            case list():
                return self._many(value, 65, 300, 9000)
            case _:
                return self._reshaped(value)

    def _many(self, value: Any, *times: int) -> Any:
        """None, two, or once in a frame so many: of many in many a frame would have gigabytes."""
        count = self._rng.choice([0, 2, 2, *(() if self._grown else times)])
        self._grown = self._grown or count > 2
        return value * count

    def _reshaped(self, tree: dict[str, Any]) -> Any:
        less = dict(tree)
        less.pop(self._rng.choice([*tree, "none"]), None)
        return self._rng.choice([{**tree, "more": 1}, less, [tree], list(tree)])


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Everything that could be something else: what it is in, and under what name or number."""
    for name, value in list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)):
        yield tree, name
        if isinstance(value, dict | list):
            yield from _places(value)


def is_right(frame: bytes) -> bool:
    """Whether the copier has to answer it; otherwise it has to hang up."""
    try:
        DECODER.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def send_frame(stranger: Stranger, frame: bytes, fds: list[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    whole = struct.pack("<I", len(frame)) + frame
    rest = whole[stranger.sock.sendmsg([whole], ancillary) :]
    if rest:  # even nothing is refused by a socket whose other end has hung up
        stranger.sock.sendall(rest)


def is_typed(reply: m.CopierReply | None) -> bool:
    """A fault of the copier's own is none of its errors."""
    if isinstance(reply, m.CopierRefused):
        return by_code(reply.code) is not CacheError
    return reply is not None


def transfers(pages: ServerPages, buffer: bytearray, number: int) -> None:
    """A bystander's store and load."""
    names, ids, held = keys(4, 1000 + 4 * number), list(range(8)), random.Random(number).randbytes(8 * PAGE)
    buffer[: len(held)] = held
    assert pages.store([(0, names, ids)]).stored == 4
    buffer[: len(held)] = bytes(len(held))
    assert pages.retrieve([(0, names, ids)]).hits == 4
    assert buffer[: len(held)] == held


def test_hostile_values_in_right_frames_are_answered_by_errors_and_leave_nothing(start: Callable[..., Node]) -> None:
    node = start()
    pid, descriptors = node.pid, Path(f"/proc/{node.pid}/fd")
    rng = random.Random(35)
    frames, at = Frames(rng, memory()), 0
    buffer = bytearray(2 * 64 * PAGE)
    bystander = register_pages(node.client, [group_of(buffer, PAGE)], "server")
    assert isinstance(bystander, ServerPages)
    transfers(bystander, buffer, 0)
    file = os.memfd_create("fuzzed")
    os.truncate(file, PAGES * PAGE)
    wrong = 0
    while at < FRAMES:
        with Stranger(node) as stranger:
            assert isinstance(stranger.ask(frames.register), m.MemoryRegistered)
            batch, last = [], None
            while last is None and len(batch) < 40:
                frame, passes = frames.next()
                if is_right(frame):
                    batch.append(frame)
                    send_frame(stranger, frame, [file] if passes else [])
                else:
                    last = frame
            awaited = sum(not isinstance(DECODER.decode(each), m.CancelJob) for each in batch)
            while awaited:
                reply = stranger.hear()
                assert is_typed(reply), (reply, [DECODER.decode(each) for each in batch])
                awaited -= not isinstance(reply, m.PagesRead)
            if last is not None:
                send_frame(stranger, last, [])
                assert stranger.hear() is None
                wrong += 1
            at += len(batch) + (last is not None)
        if rng.random() < 0.1:
            transfers(bystander, buffer, at)
    assert wrong * 10 > FRAMES > wrong * 2, "some make no sense, and most do"
    transfers(bystander, buffer, at + 1)
    assert (node.pid, node.helper["restarts"]) == (pid, 0)
    bystander.close()
    os.close(file)
    ledger = ("rows", "files", "job_bytes")
    until(lambda: node.figures["engines"] == 1 and not any(node.figures[each] for each in ledger), "the ledger at zero")
    until(lambda: not any(node.l1["leases_by_kind"].values()), "no lease is left")
    until(lambda: not any("memfd:fuzzed" in str(each.readlink()) for each in descriptors.iterdir()), "no file is open")
