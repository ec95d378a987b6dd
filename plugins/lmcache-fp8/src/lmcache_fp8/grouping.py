"""Which elements share a scale, from an object's layout."""

from __future__ import annotations

import math
from typing import NamedTuple

from lmcache_core.pool.layout import Layout

RUN_ELEMENTS = 128  # the group size if the layout names no heads: the usual head dimension


class Grouping(NamedTuple):
    """An object as `outer × tokens × mid` rows of `dim` contiguous elements, and `tail` elements after them.

    A group is the rows of up to `group` consecutive tokens at one (outer, mid); the tail, if there is one, is a
    separate group. Scales are in the order outer, token group, mid, tail.
    """

    outer: int
    tokens: int
    mid: int
    dim: int
    group: int
    tail: int

    @property
    def elements(self) -> int:
        return self.outer * self.tokens * self.mid * self.dim + self.tail

    @property
    def scales(self) -> int:
        return self.outer * -(-self.tokens // self.group) * self.mid + (self.tail > 0)

    @property
    def encoded_bytes(self) -> int:
        return 4 * self.scales + self.elements


def grouping_of(layout: Layout, group_tokens: int) -> Grouping:
    """The groups of one layout.

    With D as the last axis, a group spans D and `group_tokens` of the axis T; every other axis (head, layer, key or
    value, block) separates groups. Without H among the axes, a D that is a multiple of RUN_ELEMENTS holds several heads
    side by side and is split into runs of that length. If the axes are not named, or D is not the last, the structure
    is unknown: groups are RUN_ELEMENTS contiguous elements.
    """
    axes, shape = layout.memory_format, layout.shape
    if not axes.endswith("D") or axes.count("D") > 1 or axes.count("T") > 1:
        elements = math.prod(shape)
        return Grouping(elements // RUN_ELEMENTS, 1, 1, RUN_ELEMENTS, 1, elements % RUN_ELEMENTS)
    dim, split = shape[-1], 1
    if "H" not in axes and dim % RUN_ELEMENTS == 0:
        dim, split = RUN_ELEMENTS, dim // RUN_ELEMENTS
    at = axes.find("T")
    if at < 0:
        return Grouping(math.prod(shape[:-1]), 1, split, dim, 1, 0)
    tokens = shape[at]
    mid = math.prod(shape[at + 1 : -1]) * split
    return Grouping(math.prod(shape[:at]), tokens, mid, dim, min(group_tokens, tokens), 0)
