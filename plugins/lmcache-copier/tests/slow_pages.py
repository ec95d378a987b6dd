"""Memory that whoever reads it waits for: pages that a userfaultfd has yet to give. So a test knows that a copy is
under way, and for as long as it likes."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct

import pytest

from lmcache_core.buffers import address_of

_CALL = {"x86_64": 323, "aarch64": 282}.get(platform.machine())
_API, _REGISTER, _COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03
_API_VERSION, _MISSING = 0xAA, 1
PAGE = mmap.PAGESIZE


class SlowPages:
    """Anonymous memory, none of which is there yet."""

    def __init__(self, pages: int) -> None:
        """Skips the test where the kernel has no userfaultfd for us."""
        number = -1 if _CALL is None else ctypes.CDLL(None, use_errno=True).syscall(_CALL, os.O_CLOEXEC | os.O_NONBLOCK)
        if number < 0:
            pytest.skip("this kernel gives us no userfaultfd")
        self._fd = number
        self.buffer = mmap.mmap(-1, pages * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = address_of(memoryview(self.buffer))
        fcntl.ioctl(self._fd, _API, struct.pack("QQQ", _API_VERSION, 0, 0))
        fcntl.ioctl(self._fd, _REGISTER, struct.pack("QQQQ", self.address, pages * PAGE, _MISSING, 0))
        self.pages = pages

    def wait_touched(self) -> int:
        """The number of a page that somebody waits for."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        assert poll.poll(60_000), "nobody touches these pages"
        _, _, address = struct.unpack_from("QQQ", os.read(self._fd, 32))
        return int(address - self.address) // PAGE

    def give(self, first: int, count: int, content: bytes) -> None:
        """These are there from now on, each with this content."""
        source = ctypes.create_string_buffer(content * (PAGE // len(content)) * count + bytes(PAGE))
        start = ctypes.addressof(source)
        held = bytearray(count * PAGE + PAGE)
        view = memoryview(held)
        at = -address_of(view) % PAGE
        view[at : at + count * PAGE] = source.raw[: count * PAGE]
        del start
        fcntl.ioctl(
            self._fd,
            _COPY,
            struct.pack("QQQQq", self.address + first * PAGE, address_of(view) + at, count * PAGE, 0, 0),
        )

    def close(self) -> None:
        os.close(self._fd)
