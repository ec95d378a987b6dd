"""Memory that is given by descriptor: each registration has its own files, whatever came before it."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_copier import register_pages
from lmcache_copier.pages import SharedFile
from lmcache_core import Layout, Namespace, PageGroup, Region, Status
from lmcache_core.client import Pages
from lmcache_core.errors import LimitError
from lmcache_core.kernel.answers import Reason

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


@pytest.mark.parametrize("deadline_s", [-0.5, float("inf"), 1e12])
def test_a_deadline_beyond_what_messages_hold_costs_nobody_the_copier(shared_node: Node, deadline_s: float) -> None:
    pid, names = shared_node.pid, keys(1, 7_800)
    pages = register_pages(shared_node.client, [group_of(bytearray(1 << 20), 4096)], "server")
    late = deadline_s < 0
    stored = pages.store([(0, names, [0, 1])], deadline_s=deadline_s)
    assert Status.UNREACHABLE not in stored.statuses[0] or stored.reasons[0][0] is Reason.LATE
    found = pages.retrieve([(0, names, [0, 1])], deadline_s=deadline_s)
    assert found.statuses[0][0] is (Status.MISS if late else Status.HIT)
    assert shared_node.pid == pid


def test_more_regions_or_files_than_a_message_names_are_refused_before_the_copier_hears_of_them(
    shared_node: Node,
) -> None:
    pid, buffer = shared_node.pid, bytearray(8193)
    many = [Region(buffer, at, 1, 1, 1) for at in range(8193)]
    group = PageGroup(Namespace("many", Layout("uint8", (8193,))), many, 1)
    with pytest.raises(LimitError, match="8,192 regions"):
        register_pages(shared_node.client, [group], "server")
    assert isinstance(register_pages(shared_node.client, [group], "auto"), Pages)
    with ExitStack() as stack:
        file = shared_file(stack, b"f")
        with pytest.raises(LimitError, match="64 files"):
            register_pages(shared_node.client, [group_of(file.buffer, 4096)], "server", [file] * 65)
    assert shared_node.pid == pid


def test_a_file_of_many_regions_costs_the_copier_one_descriptor(shared_node: Node) -> None:
    descriptors = Path(f"/proc/{shared_node.pid}/fd")
    with ExitStack() as stack:
        file = shared_file(stack, b"m")
        first = register_pages(shared_node.client, [group_of(file.buffer, 64, pages=4)], "server", [file])
        before = len(list(descriptors.iterdir()))
        group = group_of(file.buffer, 64, regions=500, pages=4)
        pages = register_pages(shared_node.client, [group], "server", [file])
        assert len(list(descriptors.iterdir())) <= before + 1
        names, own = keys(2, 7_900), bytearray(os.urandom(500 * 4 * 64))
        file.buffer[: len(own)] = bytes(own)
        assert pages.store([(0, names, [3, 1, 0, 2])]).stored == 2
        target = bytearray(len(own))
        into = shared_node.client.register_pages([group_of(target, 64, regions=500, pages=4)])
        assert into.retrieve([(0, names, [3, 1, 0, 2])]).hits == 2
        assert target == own
        del first
