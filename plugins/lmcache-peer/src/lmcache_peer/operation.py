"""The operation `peer`: what the helper asks the server for, and how its figures come into `status`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from lmcache_core.server.operation import OperationContext, PoolView, ServerOperation

OPERATION = "peer"
NAMESPACES_MAX = 64


class NamespacesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Ids of namespaces that peers ask for. `figures`: of the helper, to be shown; empty: none."""

    namespaces: Annotated[list[int], msgspec.Meta(max_length=NAMESPACES_MAX)]
    figures: Annotated[dict[str, int], msgspec.Meta(max_length=32)] = {}


class NamespaceKind(msgspec.Struct):
    """What every object of a namespace has in common, and the epoch of those that are there."""

    dtype: str
    shape: list[int]
    memory_format: str
    epoch: int


class NamespacesReply(msgspec.Struct):
    """For each namespace what it is; None: the pool has nothing of it, or it is being cleared."""

    kinds: list[NamespaceKind | None]


class PeerOperation(ServerOperation):
    """On the loop: a look into two tables for each namespace."""

    request, reply = NamespacesRequest, NamespacesReply
    runs: ClassVar[Literal["loop", "lane"]] = "loop"

    def __init__(self, settings: object, context: OperationContext) -> None:
        self._context = context
        self._figures: dict[str, int] = {}

    def handle(self, request: NamespacesRequest) -> NamespacesReply:
        """What the namespaces are."""
        if request.figures:
            self._figures = request.figures
        return self._context.on_loop(lambda view: NamespacesReply([_kind(view, each) for each in request.namespaces]))

    def status(self) -> dict[str, Any]:
        """The helper's latest figures; empty without one."""
        return {"serving": dict(self._figures)}


def _kind(view: PoolView, namespace: int) -> NamespaceKind | None:
    layout, epoch = view.layout(namespace), view.epoch(namespace)
    if layout is None or epoch is None:
        return None
    return NamespaceKind(layout.dtype, list(layout.shape), layout.memory_format, epoch)
