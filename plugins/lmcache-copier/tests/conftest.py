from __future__ import annotations

from .copier_nodes import shared_node, start

__all__ = ["shared_node", "start"]
