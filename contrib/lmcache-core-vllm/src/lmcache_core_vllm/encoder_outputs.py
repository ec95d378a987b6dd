"""Outputs of a multimodal encoder as objects of the pool: pieces of one size, the first of which says how many."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from lmcache_core import Client, CommonHandle, KeyGroup, Namespace, Status
from lmcache_core.errors import CacheError
from lmcache_core.pool.layout import Layout
from lmcache_core_vllm.patience import Patience

log = logging.getLogger("vllm.lmcache_core")

PIECE_BYTES = 256 << 10
HEADER_BYTES = 256
OUTPUT_BYTES_MAX = 64 << 20  # a larger one would hold a step for long, on its way from the scheduler to the workers
LAYOUT = Layout("uint8", (PIECE_BYTES,))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Header(NamedTuple):
    """What the first piece says of an output."""

    dtype: str
    shape: list[int]

    @property
    def nbytes(self) -> int:
        """Of the output."""
        return math.prod(self.shape) * int(DTYPES[self.dtype].itemsize)


def pieces_of(nbytes: int) -> int:
    """How many pieces an output of so many bytes has."""
    return -(-(HEADER_BYTES + nbytes) // PIECE_BYTES)


class EncoderOutputs:
    """One engine's outputs in the pool, by the identifiers of what was encoded."""

    def __init__(self, client: Client, namespace: Namespace, patience: Patience) -> None:
        self.client = client
        self.namespace = namespace
        self._patience = patience
        self._why_not = ""

    def keys(self, identifier: str, pieces: range) -> list[bytes]:
        """Of an output's pieces."""
        state = hashlib.sha256(self.namespace.digest + identifier.encode())
        made = []
        for number in pieces:
            own = state.copy()
            own.update(b"\0%d" % number)
            made.append(own.digest())
        return made

    def put(self, identifier: str, output: torch.Tensor) -> bool:
        """Store it; the first piece last. Returns whether it is there now."""
        dtype = str(output.dtype).removeprefix("torch.")
        nbytes = output.numel() * output.element_size()
        if dtype not in DTYPES or not 0 < nbytes <= OUTPUT_BYTES_MAX:
            self._warn(f"an encoder output of {nbytes:,} bytes of {dtype} is not stored: {OUTPUT_BYTES_MAX:,} at most")
            return False
        if self._patience.over:
            return False
        keys = self.keys(identifier, range(pieces_of(nbytes)))
        if self._has(keys):
            return True
        header = json.dumps(Header(dtype, list(output.shape))).encode()
        whole = torch.zeros(len(keys) * PIECE_BYTES, dtype=torch.uint8)
        whole[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        flat = output.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        whole[HEADER_BYTES : HEADER_BYTES + nbytes] = flat
        pieces = list(whole.view(-1, PIECE_BYTES))
        for some in (slice(1, None), slice(0, 1)):
            if keys[some] and not self._store(keys[some], pieces[some]):
                return False
        return True

    def _store(self, keys: list[bytes], pieces: list[torch.Tensor]) -> bool:
        try:
            found = self.client.store(keys, pieces, namespace=self.namespace)
        except CacheError as error:
            self._warn(f"an encoder output is not stored: {error}")
            self._patience.waited_in_vain()
            return False
        if Status.UNREACHABLE in found.statuses:
            self._patience.waited_in_vain()
        else:
            self._patience.answered()
        return all(status in (Status.STORED, Status.EXISTS) for status in found.statuses)

    def ask(self, identifier: str, wait_s: float, pieces: range = range(1)) -> CommonHandle | None:
        """Have the server ask its tiers for these pieces and load them; does not wait. None: it has refused already."""
        group = KeyGroup(self.namespace, self.keys(identifier, pieces))
        try:
            return self.client.lookup_many_nowait([group], unit_tokens=1, hold=False, wait_s=wait_s)
        except CacheError as error:
            self._warn(f"encoder outputs are not looked up: {error}")
            return None

    def size(self, identifier: str) -> int | None:
        """How many pieces it has, by the first one in the pool; None: that is not there."""
        first = self._read(self.keys(identifier, range(1)))
        header = None if first is None else _header(first)
        return None if header is None else pieces_of(header.nbytes)

    def has(self, identifier: str) -> bool:
        """Whether the pool has all of it, by the index, which makes no call."""
        count = self.size(identifier)
        return count is not None and self._has(self.keys(identifier, range(count)))

    def get(self, identifier: str) -> torch.Tensor | None:
        """A copy of it in host memory; None: the pool does not have all of it."""
        first = self._read(self.keys(identifier, range(1)))
        header = None if first is None else _header(first)
        if first is None or header is None:
            return None
        rest = self._read(self.keys(identifier, range(1, pieces_of(header.nbytes))))
        if rest is None:
            return None
        whole = torch.cat([first, rest])[HEADER_BYTES : HEADER_BYTES + header.nbytes]
        return whole.clone().view(DTYPES[header.dtype]).view(header.shape)

    def _read(self, keys: list[bytes]) -> torch.Tensor | None:
        into = torch.empty((len(keys), PIECE_BYTES), dtype=torch.uint8)
        if keys and not self._has(keys):
            return None
        try:
            found = self.client.retrieve(keys, list(into), namespace=self.namespace, prefix=False) if keys else None
        except CacheError as error:
            self._warn(f"an encoder output is encoded anew: {error}")
            return None
        there = found is None or all(status is Status.HIT for status in found.statuses)
        return into.view(-1) if there else None

    def _has(self, keys: list[bytes]) -> bool:
        found = self.client.lookup_many([KeyGroup(self.namespace, keys)], unit_tokens=1, ask=False)
        return found.tokens == len(keys)

    def _warn(self, why: str) -> None:
        if why != self._why_not:  # once, and not for each output
            log.warning("%s", why)
        self._why_not = why


def _header(first: torch.Tensor) -> Header | None:
    """Of a first piece; None for one that was not stored here."""
    try:
        dtype, shape = json.loads(bytes(first[:HEADER_BYTES].numpy()).rstrip(b"\0"))
        header = Header(dtype, [int(size) for size in shape])
        return header if min(header.shape, default=0) > 0 and header.nbytes <= OUTPUT_BYTES_MAX else None
    except (ValueError, KeyError, TypeError):
        return None


class Search:
    """What tiers have of an output, found out without waiting."""

    def __init__(self, outputs: EncoderOutputs, identifier: str, timeout_s: float, clock: Callable[[], float]) -> None:
        self._outputs = outputs
        self._identifier = identifier
        self._timeout_s = timeout_s
        self._clock = clock
        self._until_s = clock() + timeout_s
        self._first_asked = False
        self._handle = outputs.ask(identifier, timeout_s / 2)

    def over(self) -> bool:
        """Whether it has been found, or will not be."""
        if self._handle is None:
            return True
        if self._clock() >= self._until_s:
            self.cancel()
            return True
        try:
            hits = self._handle.result
        except CacheError:
            self.cancel()
            return True
        if hits is None:
            return False
        self._handle = None
        if self._first_asked or not hits.tokens:
            return True
        self._first_asked = True
        count = self._outputs.size(self._identifier)
        if count is None or count == 1 or self._outputs.has(self._identifier):
            return True
        self._handle = self._outputs.ask(self._identifier, self._timeout_s / 2, range(1, count))
        return self._handle is None

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
