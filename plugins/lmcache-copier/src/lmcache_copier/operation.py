"""The operation `copier`: how the copier's figures come into `status`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from lmcache_core.server.operation import OperationContext, ServerOperation

OPERATION = "copier"


class FiguresReport(msgspec.Struct, forbid_unknown_fields=True):
    """The copier's figures, each by name."""

    figures: Annotated[dict[str, int], msgspec.Meta(max_length=32)]


class FiguresTaken(msgspec.Struct):
    """They are shown from now on."""


class CopierOperation(ServerOperation):
    """On the loop: it keeps a dict."""

    request, reply = FiguresReport, FiguresTaken
    runs: ClassVar[Literal["loop", "lane"]] = "loop"

    def __init__(self, settings: object, context: OperationContext) -> None:
        self._figures: dict[str, int] = {}

    def handle(self, request: FiguresReport) -> FiguresTaken:
        """Keep them."""
        self._figures = request.figures
        return FiguresTaken()

    def status(self) -> dict[str, Any]:
        """The copier's latest figures; empty without one."""
        return {"copier": dict(self._figures)}
