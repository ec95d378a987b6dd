"""SGLang's storage classes, unmodified, out of its wheel, and a pool of pages in place of its host memory.

The package around them needs CUDA: it is not imported. Parents are empty packages, and of `sglang.srt.utils` there is
what the file backend asks for. LMCACHE_CORE_SGLANG_WHEEL says where the wheel is.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PAGE_SIZE = 16
SHAPE = (2, 2, PAGE_SIZE, 4, 32)  # K and V, layers, tokens, heads, head dimension
NBYTES = 2 * 2 * PAGE_SIZE * 4 * 32 * 2
_PARENTS = ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.mem_cache")


def wheel() -> Path | None:
    """The wheel, if there is one of the version that the tests know."""
    found = Path(os.environ.get("LMCACHE_CORE_SGLANG_WHEEL", ""))
    return found if found.is_file() and found.name.startswith("sglang-0.5.23-") else None


def import_storage() -> ModuleType:
    """`sglang.srt.mem_cache.hicache_storage`."""
    name = "sglang.srt.mem_cache.hicache_storage"
    if name not in sys.modules:
        found = wheel()
        assert found is not None
        folder = Path(tempfile.mkdtemp(prefix="sglang-"))
        with zipfile.ZipFile(found) as archive:
            wanted = (
                "sglang/srt/environ.py",
                "sglang/srt/mem_cache/hicache_storage.py",
                "sglang/srt/mem_cache/storage/",
            )
            archive.extractall(folder, [each for each in archive.namelist() if each.startswith(wanted)])
        for parent in _PARENTS:
            module = ModuleType(parent)
            module.__path__ = [str(folder / parent.replace(".", "/"))]
            sys.modules[parent] = module
        common = ModuleType("sglang.srt.utils.common")
        common.human_readable_int = int  # type: ignore[attr-defined]  # of the file backend's `max_size`
        sys.modules[common.__name__] = common
    return importlib.import_module(name)


class PagePool:
    """What storage backends use of SGLang's host memory."""

    layout = "page_first"

    def __init__(self, pages: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        self.page_size = PAGE_SIZE
        self.dtype = dtype
        self.pages = torch.zeros((pages, NBYTES // dtype.itemsize), dtype=dtype)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.pages[0])

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.pages[int(index) // PAGE_SIZE].clone()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.pages[int(index) // PAGE_SIZE] = data_page


def key(number: int) -> str:
    return hashlib.sha256(number.to_bytes(8, "little")).hexdigest()


def content(number: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = hashlib.shake_128(number.to_bytes(8, "little")).digest(NBYTES)
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(dtype)


def same(page: torch.Tensor | None, number: int) -> bool:
    return page is not None and torch.equal(page.view(torch.uint8), content(number).view(torch.uint8))


def backend(extra: dict[str, Any], pool: Any = None, name: str = "dynamic", **config: Any) -> Any:
    """A backend as SGLang's own factory makes it."""
    storage = import_storage()
    factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    ours = {
        "backend_name": "lmcache-core",
        "module_path": "lmcache_hosts.sglang_hicache",
        "class_name": "HostedHiCache",
    }
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "model",
        **config,
    }
    made = storage.HiCacheStorageConfig(**values, extra_config={**(ours if name == "dynamic" else {}), **extra})
    pool = pool or PagePool()
    found = factory.create_backend(name, made, pool)
    found.register_mem_pool_host(pool)
    return found
