"""Frames of every message of the protocol: built from the types, with values inside, at and beyond their ranges."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
from msgspec import inspect

from lmcache_core.protocol import messages as m

HUGE = [-1, -(2**31), -(2**63), 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 10**6, 0xFFFF, 1025]
FLOATS = [math.nan, math.inf, -math.inf, -1.0, -0.0, 1e308, -1e308, 5e-324, 1e9, 0.0, 0.5]
TEXTS = ["", "\0", "a\0b", "\n", "\x1b[2J", "é" * 40, "x" * 5000, "../../etc", "uint8", "float16", "add", "l1", "KLTHD"]
KEYS = [number.to_bytes(32, "big") for number in range(24)]


class Frames:
    """An endless stream. `ids`: lease and other ids that were given out; whoever reads the answers adds to them."""

    def __init__(self, seed: int, kinds: tuple[type[Any], ...], namespaces: list[int]) -> None:
        self._rng = random.Random(seed)
        self._infos = [inspect.type_info(kind) for kind in kinds]
        self._namespaces = namespaces
        self.ids: list[int] = [0]
        self.sent: dict[str, int] = {}

    def __iter__(self) -> Iterator[bytes]:
        rng, encode = self._rng, msgspec.msgpack.Encoder().encode
        while True:
            info: Any = rng.choice(self._infos)
            wild = rng.random() < 0.5  # in half of the frames everything is within its range
            fields = [self._field(field, wild) for field in info.fields]
            if wild and rng.random() < 0.05:
                fields = fields[: rng.randrange(len(fields) + 1)]
            elif wild and rng.random() < 0.05:
                fields.append(self._wild())
            self.sent[info.tag] = self.sent.get(info.tag, 0) + 1
            yield encode([info.tag, *fields])

    def _field(self, field: Any, wild: bool) -> Any:
        name, rng = field.name, self._rng
        if wild and rng.random() < 0.25:
            return self._wild()
        if name == "rid":
            return rng.randrange(1, 1 << 32)
        if name == "namespace" and rng.random() < 0.9:
            return rng.choice(self._namespaces)
        if name == "keys":
            return b"".join(rng.choices(KEYS, k=rng.choice([0, 1, 3, 8, 20])))
        if name in ("lease", "promise", "job", "lookup") and rng.random() < 0.8:
            return rng.choice(self.ids[-20:])
        if name == "goodbye":
            return rng.random() < 0.01
        return self._value(field.type, wild)

    def _wild(self) -> object:
        rng = self._rng
        makers: list[Callable[[], object]] = [
            lambda: rng.choice(HUGE),
            lambda: rng.choice(FLOATS),
            lambda: rng.choice(TEXTS),
            lambda: rng.randbytes(rng.choice([0, 1, 7, 8, 31, 33, 300, 33_000])),
            lambda: None,
            lambda: [rng.choice(HUGE)] * rng.choice([1, 33, 7000]),
            lambda: {rng.choice(TEXTS): rng.choice(FLOATS)},
            lambda: [[[]]],
            lambda: rng.random() < 0.5,
        ]
        return rng.choice(makers)()

    def _value(self, kind: Any, wild: bool) -> Any:
        rng = self._rng
        match kind:
            case inspect.IntType():
                low, high = kind.ge or 0, min(2**64 - 1, 2**64 - 1 if kind.le is None else kind.le)
                if wild and rng.random() < 0.3:
                    return rng.choice(HUGE)
                return rng.choice([low, high, min(high, low + rng.randrange(8)), rng.randint(low, high)])
            case inspect.FloatType():
                return rng.choice(FLOATS) if wild else rng.choice([0.0, 0.001, 1.0, kind.le or 1.0])
            case inspect.StrType():
                return rng.choice(TEXTS)[: kind.max_length] if wild else rng.choice(["", "uint8", "x", "default"])
            case inspect.BytesType():
                length = rng.choice([kind.min_length or 0, 8, 16, 32, 64])
                return rng.randbytes(min(length, kind.max_length or length))
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.ListType():
                return [self._value(kind.item_type, wild) for _ in range(rng.choice([0, 1, 2, 5]))]
            case inspect.DictType():
                number = rng.choice([0, 1, 3])
                return {self._value(kind.key_type, wild): self._value(kind.value_type, wild) for _ in range(number)}
            case inspect.UnionType():
                return self._value(rng.choice(kind.types), wild)
            case inspect.StructType():
                return [self._field(field, wild) for field in kind.fields]
            case inspect.NoneType():
                return None
        return self._wild()


REQUESTS: tuple[type[object], ...] = get_args(m.Request)
REPLIES: tuple[type[object], ...] = get_args(m.Reply)
