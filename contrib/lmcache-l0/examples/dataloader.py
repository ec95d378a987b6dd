"""Embeddings for a PyTorch DataLoader: python dataloader.py fork|spawn

All workers read one table. Each asks for its whole batch at once (`__getitems__`), into memory of its own, which torch
then hands to the trainer; so nothing of a batch can be overwritten while it is trained on.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from lmcache_l0 import SharedCache
from torch.utils.data import DataLoader, Dataset

FLOATS = 128


class Embeddings(Dataset[torch.Tensor]):
    """The rows of a table, by their numbers."""

    def __init__(self, cache: SharedCache, count: int) -> None:
        self.cache = cache  # forked workers inherit it; spawned ones attach by its path
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: int) -> torch.Tensor:
        found = self.cache.get_torch(f"emb:{item}", shape=(FLOATS,), dtype=torch.float32, snapshot=True)
        assert found is not None
        return found

    def __getitems__(self, items: list[int]) -> list[torch.Tensor]:
        rows = np.zeros((len(items), FLOATS), np.float32)
        self.cache.get_many_into(keys=[f"emb:{item}" for item in items], out=rows)
        return list(torch.from_numpy(rows))


def main(method: str, folder: str, count: int = 1000) -> float:
    """Sum all embeddings, by two workers."""
    with SharedCache(Path(folder) / "emb.l0", hash_slots=2 * count, max_value_size=4 * FLOATS) as cache:
        for i in range(count):
            cache.set_numpy(f"emb:{i}", np.full(FLOATS, i, np.float32))
        loader = DataLoader(
            Embeddings(cache, count), batch_size=64, shuffle=True, num_workers=2, multiprocessing_context=method
        )
        total = sum(float(batch.double().sum()) for batch in loader)
        cache.unlink()
    return total


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(f"{main(sys.argv[1] if len(sys.argv) > 1 else 'spawn', folder)}\n")
