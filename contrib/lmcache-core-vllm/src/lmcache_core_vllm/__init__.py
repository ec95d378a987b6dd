"""vLLM on lmcache-core: `kv_connector="LMCacheCoreConnector"`, `kv_connector_module_path="lmcache_core_vllm"`.

Importing this module imports neither vLLM nor torch. The class needs both, and raises a clear error if they are
missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core_vllm.connector import LMCacheCoreConnector

__all__ = ["LMCacheCoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "LMCacheCoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from lmcache_core_vllm.connector import LMCacheCoreConnector
    except ModuleNotFoundError as error:
        raise ImportError(
            f"LMCacheCoreConnector needs vLLM 0.32 or later in the same environment, and {error.name!r} cannot be "
            "imported: install lmcache-core-vllm where vLLM is installed"
        ) from error
    return LMCacheCoreConnector
