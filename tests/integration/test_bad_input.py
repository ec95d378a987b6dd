"""What a caller gets wrong is said at once, by name and with the cure, and nothing of it stays behind."""

from __future__ import annotations

import signal
import threading
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lmcache_core.client.results import Status
from lmcache_core.errors import LimitError, UsageError
from lmcache_core.limits import BATCH_KEYS_MAX, OPERATION_KEYS_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace

from ..conftest import Node, ServerProcess

torch = pytest.importorskip("torch")
HALF = Namespace("half", Layout("bfloat16", (2, 64, 8), "KTD"))
BAD_OBJECTS = {
    "another dtype": (torch.zeros(2, 64, 8), r"tensor 1 is float32 .*convert it, or register its dtype"),
    "the same numbers in another shape": (
        torch.zeros(64, 2, 8, dtype=torch.bfloat16),
        r"tensor 1 has shape \(64, 2, 8\)",
    ),
    "another shape": (torch.zeros(2, 64, 9, dtype=torch.bfloat16), r"tensor 1 has shape \(2, 64, 9\)"),
    "not contiguous": (torch.zeros(2, 8, 64, dtype=torch.bfloat16).mT, r"tensor 1 .*call \.contiguous\(\)"),
    "too few bytes": (bytearray(2047), r"object 1 has 2,047 bytes .* 2,048"),
    "an array of another item size": (np.zeros(512, np.float32), r"object 1 has items of format 'f' .*cast\('H'\)"),
    "opaque bytes": (bytes(2048), r"object 1 has items of format 'B' .*uint8 layout"),
    "an array of another dtype": (np.zeros(1024, np.int16), r"object 1 has items of format 'h' .*convert it"),
    "an array of another shape": (np.zeros((64, 2, 8), np.uint16), r"object 1 has shape \(64, 2, 8\) .*reshape it"),
    "an array that is not contiguous": (np.zeros((64, 32), np.uint8).T[:, :32], r"object 1 is not contiguous"),
    "no buffer at all": ([1, 2, 3], r"object 1 is a list: pass a torch tensor"),
    "text": ("x" * 2048, r"object 1 is a str"),
}
BAD_KEYS = {
    "a set, which has no order": ({b"k" * 32}, "keys is a set: give a sequence"),
    "what has no length": ((b"k" * 32 for _ in range(1)), "keys is a generator: give a sequence"),
    "nothing": (None, "keys is a NoneType: give a sequence"),
    "a short key": ([b"k" * 31], r"key 0 has 31 bytes.*lmcache_core\.tokens"),
    "text": (["k" * 32], r"keys must be bytes-like .*str"),
    "a number": ([7], r"keys must be bytes-like .*int"),
    "one bytes object": (b"k" * 32, "one bytes object"),
    "one text": ("k" * 32, "one str object"),
    "lengths that make up for each other": ([b"k" * 31, b"k" * 33], "key 0 has 31 bytes"),
}


@pytest.fixture
def node(shared_node: Node) -> Node:
    return shared_node


@pytest.mark.parametrize("case", BAD_OBJECTS)
def test_an_object_that_is_not_of_the_layout_is_named_with_the_cure(node: Node, case: str) -> None:
    client = node.client()
    bad, message = BAD_OBJECTS[case]
    good = torch.zeros(2, 64, 8, dtype=torch.bfloat16)
    keys = [node.key("a"), node.key("b")]
    with pytest.raises(UsageError, match=message):
        client.store(keys, [good, bad], namespace=HALF)
    with pytest.raises(UsageError, match=message):
        client.retrieve(keys, [good, bad], namespace=HALF)
    assert client.lookup(keys, namespace=HALF).hits == 0
    assert client.status()["l1"]["used_bytes"] == 0


@pytest.mark.parametrize("case", BAD_KEYS)
def test_a_bad_key_is_refused_by_every_operation(node: Node, case: str) -> None:
    client = node.client()
    keys, message = BAD_KEYS[case]
    objects = [bytearray(65536) for _ in range(len(keys))] if hasattr(keys, "__len__") else []
    for operation in (
        lambda: client.store(keys, objects, namespace=node.namespace),
        lambda: client.retrieve(keys, objects, namespace=node.namespace),
        lambda: client.lookup(keys, namespace=node.namespace),
        lambda: client.lookup_nowait(keys, namespace=node.namespace),
        lambda: client.prepare_store(keys, namespace=node.namespace),
        lambda: client.prepare_retrieve(keys, namespace=node.namespace),
        lambda: client.pin(keys, namespace=node.namespace),
        lambda: client.unpin(keys, namespace=node.namespace),
    ):
        with pytest.raises(UsageError, match=message):
            operation()
    assert client.status()["l1"]["leases_by_kind"] == {"promise": 0, "read": 0, "write": 0}


def test_a_bad_key_behind_the_first_page_is_named_by_its_own_position_and_nothing_is_held(node: Node) -> None:
    client = node.client()
    small = Namespace("small", Layout("uint8", (64,)))
    keys = [node.key(number) for number in range(2 * BATCH_KEYS_MAX)]
    keys[1500] = b"short"
    objects = [bytearray(64) for _ in keys]
    for operation in (
        lambda: client.prepare_store(keys, namespace=small),
        lambda: client.store(keys, objects, namespace=small),
        lambda: client.retrieve(keys, objects, namespace=small),
    ):
        with pytest.raises(UsageError, match="key 1500 has 5 bytes"):
            operation()
    assert client.lookup(keys[:1], namespace=small).hits == 0
    assert client.status()["l1"]["leases_by_kind"] == {"promise": 0, "read": 0, "write": 0}


def test_too_many_keys_are_refused_with_the_limit(node: Node) -> None:
    client = node.client()
    keys = [node.key("a")] * (OPERATION_KEYS_MAX + 1)
    with pytest.raises(LimitError, match=r"1,048,577 keys .*1,048,576: split the batch"):
        client.lookup(keys, namespace=node.namespace)
    with pytest.raises(LimitError, match="lookup_nowait takes at most 1024 keys, got 1025"):
        client.lookup_nowait(keys[:1025], namespace=node.namespace)


def test_objects_and_keys_must_be_as_many(node: Node) -> None:
    with pytest.raises(UsageError, match="1 objects for 2 keys: give one for each key"):
        node.client().store([node.key("a"), node.key("b")], [bytes(65536)], namespace=node.namespace)


def test_an_object_larger_than_the_pool_is_said_at_registration_and_a_status_afterwards(node: Node) -> None:
    client = node.client()
    huge = Namespace("huge", Layout("uint8", (64 << 20,)))
    with pytest.raises(UsageError, match=r"67,108,864 bytes.*raise l1\.size_bytes, or use fewer tokens"):
        client.register_layout(huge)
    with client.prepare_store([node.key("a")], namespace=huge) as lease:
        assert lease.statuses == [Status.TOO_LARGE]
    assert client.lookup([node.key("a")], namespace=huge).hits == 0


def test_what_may_be_written_from_and_read_into_is_anything_of_the_layouts_items(node: Node) -> None:
    client = node.client()
    tensor = torch.randn(2, 64, 8).to(torch.bfloat16)
    raw = bytes(tensor.view(torch.uint8).numpy())
    views = [tensor, memoryview(raw).cast("H"), array("H", raw), np.frombuffer(raw, np.uint16)]
    keys = [node.key(number) for number in range(len(views))]
    assert client.store(keys, views, namespace=HALF).stored == len(views)
    back = torch.zeros(2, 64, 8, dtype=torch.bfloat16)
    items = np.zeros((2, 64, 8), np.uint16)
    for key in keys:
        assert client.retrieve([key, keys[0]], [back, items], namespace=HALF).hits == 2
        assert torch.equal(back, tensor)
        assert items.tobytes() == raw
        back.zero_()
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
    assert client.lookup(rows, namespace=HALF).hits == len(keys)  # keys, too, are anything with 32 bytes


def test_a_position_that_a_lease_does_not_have_is_named(node: Node) -> None:
    client = node.client()
    client.store([node.key("a")], [node.payload(1)], namespace=node.namespace)
    keys = [node.key("a"), node.key("b")]
    with client.prepare_retrieve(keys, namespace=node.namespace, prefix=False) as lease:
        with pytest.raises(UsageError, match="position 1 has no slot: it is miss"):
            lease.view(1)
        with pytest.raises(UsageError, match="position 7 is not in this lease of 2 keys"):
            lease.view(7)
        with pytest.raises(UsageError, match="position 1 is not open"):
            lease.finish([1])
        assert lease.view(0) == node.payload(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float12", (4,)), "float12"),
        (("uint8", ()), "1 to 32 dimensions"),
        (("uint8", (4, -1)), "whole number from 1"),
        (("uint8", (4, 4), "K"), "one letter for each axis"),
        (("uint8", (1 << 40,)), "whole number from 1"),
        (("uint8", (1 << 30, 1 << 30)), "fewer tokens per chunk"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_where_it_is_made(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Layout(*arguments)


@pytest.mark.parametrize("tiers", ["disk", 7, [7], {"disk": 1}, b"disk"])
def test_tiers_that_are_no_list_of_names_are_refused_by_every_lookup(node: Node, tiers: Any) -> None:
    client = node.client()
    for lookup in (client.lookup, client.lookup_nowait):
        with pytest.raises(UsageError, match="give a list of names"):
            lookup([node.key("a")], namespace=node.namespace, tiers=tiers)
    assert client.lookup([node.key("a")], namespace=node.namespace, tiers=()).hits == 0


SMALL = Namespace("small", Layout("uint8", (64,)))
SEQUENCES: dict[str, Callable[[list[bytes]], Any]] = {
    "a tuple": tuple,
    "a deque": deque,
    "the keys of a dict": lambda keys: dict.fromkeys(keys).keys(),
    "rows of an array": lambda keys: np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32),
    "views": lambda keys: [memoryview(key) for key in keys],
    "bytearrays": lambda keys: [bytearray(key) for key in keys],
}


@pytest.mark.parametrize("use_index", [True, False])
@pytest.mark.parametrize("kind", SEQUENCES)
def test_keys_are_any_sequence_of_anything_with_32_bytes_to_every_operation(
    node: Node, kind: str, use_index: bool
) -> None:
    client = node.client(use_index=use_index)
    keys = SEQUENCES[kind]([node.key(number) for number in range(3)])
    more = SEQUENCES[kind]([node.key(f"m{number}") for number in range(3)])
    objects = [bytes([number]) * 64 for number in range(3)]
    assert client.store(keys, objects, namespace=SMALL).stored == 3
    into = [bytearray(64) for _ in objects]
    assert client.retrieve(keys, into, namespace=SMALL).hits == 3
    assert into == objects
    assert client.lookup(keys, namespace=SMALL).hits == 3
    assert client.lookup_nowait(keys, namespace=SMALL).wait(30).hits == 3
    with client.prepare_store(more, namespace=SMALL) as lease:
        assert lease.granted == [0, 1, 2]
    for optimistic in (False, True):
        with client.prepare_retrieve(keys, namespace=SMALL, optimistic=optimistic) as lease:
            assert [bytes(lease.view(at)) for at in range(3)] == objects
    assert client.pin(keys, namespace=SMALL) == client.unpin(keys, namespace=SMALL) == [Status.GRANTED] * 3
    assert len(client.explain(keys, namespace=SMALL)) == 3
    assert client.status()["l1"]["leases_by_kind"] == {"promise": 0, "read": 0, "write": 0}


@pytest.mark.parametrize(
    "positions",
    [
        [0.0, 2.0],
        [True, False, True],
        np.array([True, False, True]),
        torch.tensor([True, False]),
        ["0"],
        [None],
        [[0]],
        2,
    ],
    ids=str,
)
def test_invalid_positions_are_refused_and_publish_nothing(node: Node, positions: Any) -> None:
    client = node.client()
    keys = [node.key(number) for number in range(3)]
    with client.prepare_store(keys, namespace=SMALL) as lease:
        for settle in (lease.commit, lambda each: lease.commit(each, checksums=False), lease.abort):
            with pytest.raises(UsageError, match=r"not a position: give whole numbers|give a list of positions"):
                settle(positions)
        assert lease.granted == [0, 1, 2]
    assert client.lookup(keys, namespace=SMALL, prefix=False).hits == 0
    client.store(keys, [bytes(64)] * 3, namespace=SMALL)
    for optimistic in (False, True):
        with client.prepare_retrieve(keys, namespace=SMALL, optimistic=optimistic) as lease:
            with pytest.raises(UsageError, match=r"not a position: give whole numbers|give a list of positions"):
                lease.finish(positions)
            with pytest.raises(UsageError, match="not a position: give whole numbers"):
                lease.view(1.0)


@pytest.mark.parametrize("positions", [np.array([2, 0]), torch.tensor([0, 2]), (at for at in (0, 2)), {0, 2}], ids=str)
def test_positions_are_any_whole_numbers(node: Node, positions: Any) -> None:
    client = node.client()
    keys = [node.key(number) for number in range(3)]
    with client.prepare_store(keys, namespace=SMALL) as lease:
        lease.commit(positions)
    assert [client.lookup([key], namespace=SMALL).hits for key in keys] == [1, 0, 1]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"wait_s": "1"}, "wait_s is '1': give a number of seconds"),
        ({"deadline_s": None}, "deadline_s is None: give a number of seconds"),
        ({"pin_s": "1"}, "pin_s is '1': give a number of seconds"),
        ({"window": 2.0}, "window is 2.0: give a whole number"),
        ({"window": "2"}, "window is '2': give a whole number"),
        ({"policy": 7}, "policy is 7: give its name"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_and_not_taken_for_a_server_that_is_gone(
    node: Node, option: Any, message: str
) -> None:
    client = node.client()
    keys = [node.key("a"), node.key("b")]
    with pytest.raises(UsageError, match=message):
        client.lookup(keys, namespace=SMALL, **option)
    with pytest.raises(UsageError, match=message):
        client.lookup_nowait(keys, namespace=SMALL, **option).wait(30)


def test_options_are_numbers_of_any_kind(node: Node) -> None:
    client = node.client()
    keys = [node.key("a"), node.key("b")]
    client.store(keys[:1], [bytes(64)], namespace=SMALL)
    for option in ({"wait_s": np.float32(0.01)}, {"wait_s": True}, {"pin_s": 1}, {"window": np.int64(1)}):
        assert client.lookup(keys, namespace=SMALL, **option).hits == 1
        assert client.lookup_nowait(keys, namespace=SMALL, **option).wait(30).hits == 1


def test_no_time_is_too_long_to_wait(node: Node, shared_server: ServerProcess) -> None:
    for longest in (1e12, float("inf")):
        client = node.client(call_timeout_s=longest, connect_timeout_s=longest)
        client.noop()
        shared_server.signal(signal.SIGSTOP)
        going_on = threading.Timer(0.2, shared_server.signal, (signal.SIGCONT,))
        going_on.start()
        client.noop()
        assert client.lookup_nowait([node.key("a")], namespace=SMALL).wait(longest).hits == 0
        going_on.join()


def test_an_array_that_shows_no_buffer_is_named_with_the_cure(node: Node) -> None:
    client = node.client()
    dates = np.zeros(8, "M8[s]")  # as with bfloat16 of ml_dtypes, there is no buffer format for it
    for operation in (client.store, client.retrieve):
        with pytest.raises(UsageError, match=r"object 0 has no buffer .*array\.view"):
            operation([node.key("a")], [dates], namespace=SMALL)
    assert client.store([node.key("a")], [dates.view(np.uint8)], namespace=SMALL).stored == 1
