"""Caches whose memory is gone: an error in words, in a process of its own, since a signal would end it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

# A cache that keeps heads inside of tokens has to be copied before its pages are.
REGIONS = """
import mmap, os, sys, warnings
from types import SimpleNamespace as Of

import torch

from lmcache_core.errors import UsageError
from lmcache_transformers.chunks import regions_of

warnings.simplefilter("ignore")
file = os.memfd_create("cache")
os.truncate(file, 1 << 20)
keys = torch.ones(2048) if sys.argv[1] == "freed" else torch.frombuffer(mmap.mmap(file, 1 << 20), dtype=torch.float32)
keys = keys[:2048].reshape(1, 64, 2, 16).transpose(1, 2)
layer = Of(keys=keys, values=torch.ones(1, 2, 64, 16), get_seq_length=lambda: 64)
shape = Of(index=0, key_dim=16, value_dim=16, heads=2, dtype=torch.float32)
keys.untyped_storage().resize_(0) if sys.argv[1] == "freed" else os.truncate(file, 0)
try:
    regions_of(Of(layers=[layer]), Of(layers=[shape], layers_in_cache=1), 16, 4)
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize("how", ["freed", "truncated"])
def test_a_cache_whose_memory_is_gone_is_refused(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", REGIONS, how], capture_output=True, text=True, check=True)
    assert "a tensor of the cache" in done.stdout
