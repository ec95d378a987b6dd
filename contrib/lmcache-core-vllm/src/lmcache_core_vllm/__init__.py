"""vLLM on lmcache-core: `kv_connector="LMCacheCoreConnector"`, `kv_connector_module_path="lmcache_core_vllm"`. For the
outputs of multimodal encoders: `ec_connector="LMCacheCoreECConnector"`, with the same `ec_connector_module_path`.

Importing this module imports neither vLLM nor torch. The classes need both, and raise a clear error if they are
missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_core_vllm.connector import LMCacheCoreConnector
    from lmcache_core_vllm.encoder import LMCacheCoreECConnector

__all__ = ["LMCacheCoreConnector", "LMCacheCoreECConnector"]

_MODULES = {"LMCacheCoreConnector": "connector", "LMCacheCoreECConnector": "encoder"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lmcache_core_vllm import versions

    try:
        import vllm

        if versions.is_too_old(vllm.__version__):
            raise ImportError(versions.refusal(vllm.__version__))
        module = import_module(f"lmcache_core_vllm.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs vLLM 0.32 or later in the same environment, and {error.name!r} cannot be "
            "imported: install lmcache-core-vllm where vLLM is installed"
        ) from error
    return getattr(module, name)
