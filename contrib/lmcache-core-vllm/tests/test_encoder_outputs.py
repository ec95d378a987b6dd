"""Outputs of any size are cut into pieces and come back; what is not whole is not there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_core import Namespace
from lmcache_core.errors import UsageError
from lmcache_testing.processes import ServerProcess

torch = pytest.importorskip("torch")

from lmcache_core_vllm.encoder_outputs import (  # noqa: E402  # it needs torch
    HEADER_BYTES,
    LAYOUT,
    OUTPUT_BYTES_MAX,
    PIECE_BYTES,
    EncoderOutputs,
    Search,
    pieces_of,
)
from lmcache_core_vllm.patience import Patience  # noqa: E402  # as above


@pytest.fixture(scope="module")
def outputs() -> Iterator[EncoderOutputs]:
    with ServerProcess(64 << 20) as server, server.client() as client:
        yield EncoderOutputs(client, Namespace("m", LAYOUT), Patience(1.0, time.monotonic))


@pytest.mark.parametrize("room", [-8, 0, 8])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_output_that_just_fits_comes_back(outputs: EncoderOutputs, pieces: int, room: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    output = torch.randn((pieces * PIECE_BYTES - HEADER_BYTES + room) // kind.itemsize).to(kind).view(1, -1, 2)
    name = f"{pieces} {room} {dtype}"
    assert outputs.put(name, output)
    found = outputs.get(name)
    assert found is not None
    assert found.dtype == kind
    assert torch.equal(found, output)
    assert outputs.size(name) == pieces_of(output.numel() * kind.itemsize) == pieces + (room > 0)


def test_an_output_that_is_no_whole_rows_in_memory_is_stored_as_it_reads(outputs: EncoderOutputs) -> None:
    output = torch.randn(64, 33).t()
    assert outputs.put("turned", output)
    found = outputs.get("turned")
    assert found is not None
    assert torch.equal(found, output)


@pytest.mark.parametrize(
    "output",
    [
        torch.zeros(0, 8),
        torch.zeros(4, 4, dtype=torch.int64),
        torch.zeros(1, dtype=torch.float32).expand(OUTPUT_BYTES_MAX),
    ],
    ids=["empty", "integers", "too large"],
)
def test_what_is_no_output_of_an_encoder_is_not_stored(outputs: EncoderOutputs, output: torch.Tensor) -> None:
    assert not outputs.put("none", output)
    assert outputs.get("none") is None


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff", b"[]", b'["float32", [-4, 4]]', b'["float32", [99999999]]', b'["int64", [4]]', b'["float32", []]'],
)
def test_a_first_piece_that_another_program_has_stored_is_no_output(outputs: EncoderOutputs, header: bytes) -> None:
    name = f"strange {header!r}"
    piece = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
    piece[: len(header)] = torch.frombuffer(bytearray(header or b"\0"), dtype=torch.uint8)[: len(header)]
    assert outputs.client.store(outputs.keys(name, range(1)), [piece], namespace=outputs.namespace).stored == 1
    assert outputs.get(name) is None
    assert not outputs.has(name)


@pytest.mark.parametrize("later", [True, False])
def test_a_search_that_the_server_refuses_is_over(
    outputs: EncoderOutputs, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    """A fast server's answer is there before the question's call returns: for the first piece, or for the rest."""
    answered = [SimpleNamespace(result=SimpleNamespace(tokens=1))] * later

    def refuse(*_: Any, **__: Any) -> Any:
        if answered:
            return answered.pop()
        raise UsageError("no such namespace here")

    monkeypatch.setattr(outputs.client, "lookup_many_nowait", refuse)
    monkeypatch.setattr(outputs, "size", lambda _: 3)
    search = Search(outputs, f"refused {later}", 20.0, time.monotonic)
    assert search.over()
    assert not answered
