"""One file in the temporary folder, as a block device has it."""

from __future__ import annotations

import os
from pathlib import Path

from services.service import Service


class Block(Service):
    name = "block"
    tier_type = "block"
    shared = False

    def __init__(self) -> None:
        self._path: Path | None = None

    def start(self, folder: Path) -> None:
        self._path = folder / "medium"

    def healthy(self) -> bool:
        return self._path is not None and self._path.parent.is_dir()

    def stop(self) -> None:
        """Nothing runs; the file is large, and ours."""
        if self._path is not None and self.ours:
            self._path.unlink(missing_ok=True)

    def adapter_settings(self) -> dict[str, object]:
        assert self._path is not None
        direct = self._takes_direct(self._path.parent)
        return {"path": self._path, "size_bytes": 512 << 20, "io_mode": "direct" if direct else "buffered"}

    @staticmethod
    def _takes_direct(folder: Path) -> bool:
        probe = folder / "probe"
        try:
            os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        except OSError:
            return False
        finally:
            probe.unlink(missing_ok=True)
        return True

    @classmethod
    def at(cls, endpoint: str) -> Block:
        """A directory of the user's own."""
        block = cls()
        block._path = Path(endpoint).absolute() / "lmcache-matrix.block"
        return block
