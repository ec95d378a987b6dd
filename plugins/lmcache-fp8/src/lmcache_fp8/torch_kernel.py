"""The vectorised torch implementation, for machines without the C kernel: operation by operation the same as
kernels.h."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lmcache_core.serde.contract import Buffer
from lmcache_fp8.grouping import Grouping
from lmcache_fp8.kernels import Kernel, bad_scale

STEP_ELEMENTS = 1 << 16  # elements at a time: temporaries stay in the cache, and no copy holds the GIL for long
CODE_NAN = 0x7F
CODE_MAX = 448.0
ONE_448TH = float.fromhex("0x1.24924ap-9")
SCALE_MIN = float.fromhex("0x1p-126")
SCALE_MAX = float.fromhex("0x1.249248p+119")  # times 448 it is still finite

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# torch's vectorised and plain casts disagree on the bits of a NaN: ours are set by hand.
QUIET_NAN = {
    "bfloat16": (torch.int16, 0x7FC0),
    "float16": (torch.int16, 0x7E00),
    "float32": (torch.int32, 0x7FC00000),
}


class TorchKernel(Kernel):
    """Whole blocks of groups at a time, on the CPU, in the calling thread's torch settings."""

    def encode(self, src: memoryview, dtype: str, grouping: Grouping) -> Buffer:
        out = bytearray(grouping.encoded_bytes)
        itemsize = src.nbytes // grouping.elements
        whole = memoryview(out)
        for scale_at, first, shape in _blocks(grouping):
            count = shape.numel()
            values = _tensor_of(src[first * itemsize : (first + count) * itemsize], TORCH_DTYPES[dtype])
            scales, codes = _quantised(values.view(shape).to(torch.float32))
            _put(whole, scale_at * 4, scales)
            _put(whole, grouping.scales * 4 + first, codes)
        return out

    def decode(self, src: memoryview, into: memoryview, dtype: str, grouping: Grouping) -> None:
        scales = _tensor_of(src[: grouping.scales * 4], torch.float32)
        good = (scales >= SCALE_MIN) & (scales <= SCALE_MAX)
        if not bool(good.all()):
            raise bad_scale(int((~good).nonzero()[0]))
        codes_at = grouping.scales * 4
        itemsize = into.nbytes // grouping.elements
        for scale_at, first, shape in _blocks(grouping):
            codes = _tensor_of(src[codes_at + first : codes_at + first + shape.numel()], torch.uint8).view(shape)
            groups = shape[0] * shape[2]
            factors = scales[scale_at : scale_at + groups].view(shape[0], 1, shape[2], 1)
            _put(into, first * itemsize, _restored(codes, factors, dtype))


def _blocks(grouping: Grouping) -> Iterator[tuple[int, int, torch.Size]]:
    """(first scale, first element, shape) of blocks `[groups, tokens, mid, dim]`, each in one piece."""
    row = grouping.mid * grouping.dim
    whole, rest = divmod(grouping.tokens, grouping.group)
    scale_at, first = 0, 0
    runs = [(whole, grouping.group), (1, rest)] if rest else [(whole, grouping.group)]
    outer = grouping.outer
    if not rest:  # nothing interrupts the groups: all outer indices are one run
        runs, outer = [(whole * grouping.outer, grouping.group)], 1
    for _ in range(outer):
        for groups, tokens in runs:
            step = max(1, STEP_ELEMENTS // (tokens * row))
            for start in range(0, groups, step):
                shape = torch.Size((min(step, groups - start), tokens, grouping.mid, grouping.dim))
                yield scale_at, first, shape
                scale_at += shape[0] * grouping.mid
                first += shape.numel()
    if grouping.tail:
        yield scale_at, first, torch.Size((1, 1, 1, grouping.tail))


def _quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales `[groups, mid]` and codes like `values`, a float32 `[groups, tokens, mid, dim]`."""
    not_finite = ~torch.isfinite(values)
    magnitude = values.abs().masked_fill_(not_finite, 0.0)
    scales = (magnitude.amax(dim=(1, 3), keepdim=True) * ONE_448TH).clamp_(SCALE_MIN, SCALE_MAX)
    scaled = (values * scales.reciprocal()).clamp_(-CODE_MAX, CODE_MAX)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return scales, codes.masked_fill_(not_finite, CODE_NAN)


def _restored(codes: torch.Tensor, factors: torch.Tensor, dtype: str) -> torch.Tensor:
    values = codes.view(torch.float8_e4m3fn).to(torch.float32).mul_(factors).to(TORCH_DTYPES[dtype])
    as_int, nan = QUIET_NAN[dtype]
    values.view(as_int).masked_fill_((codes & CODE_NAN) == CODE_NAN, nan)
    return values


def _tensor_of(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a copy: torch warns about read-only memory, and refuses unaligned addresses."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data.nbytes else torch.empty(0, dtype=dtype)


def _put(into: memoryview, at: int, values: torch.Tensor) -> None:
    target = torch.frombuffer(into[at : at + values.nbytes], dtype=torch.uint8)
    target.copy_(values.reshape(-1).view(torch.uint8))
