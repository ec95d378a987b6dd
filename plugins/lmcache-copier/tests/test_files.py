"""Memory that is given by descriptor: each registration has its own files, whatever came before it."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack

from lmcache_copier import register_pages
from lmcache_copier.pages import SharedFile
from lmcache_core import Status

from .copier_nodes import Node, group_of, keys


def shared_file(stack: ExitStack, fill: bytes) -> SharedFile:
    fd = os.memfd_create("pages")
    stack.callback(os.close, fd)
    os.write(fd, fill * (1 << 20))
    return SharedFile(fd, mmap.mmap(fd, 1 << 20))


def test_a_file_that_no_region_lies_in_is_not_taken_for_the_next_registrations(shared_node: Node) -> None:
    with ExitStack() as stack:
        first, spare, second = (shared_file(stack, fill) for fill in (b"1", b"x", b"2"))
        one = register_pages(shared_node.client, [group_of(first.buffer, 4096)], "server", [first, spare])
        two = register_pages(shared_node.client, [group_of(second.buffer, 4096)], "server", [second])
        names, ids = keys(2, 7_700), list(range(4))
        assert two.store([(0, names, ids)]).stored == 2
        assert two.retrieve([(0, names, [8, 9, 10, 11])]).statuses[0][0] is Status.HIT
        own = shared_node.client.register_pages([group_of(target := bytearray(1 << 20), 4096)])
        assert own.retrieve([(0, names, ids)]).hits == 2
        assert bytes(target[: 4 * 4096]) == b"2" * (4 * 4096)
        del one, two
