"""The disk: a directory in the temporary folder."""

from __future__ import annotations

from pathlib import Path

from services.service import Service


class Disk(Service):
    name = "disk"
    tier_type = "fs"

    def __init__(self) -> None:
        self._path: Path | None = None

    def start(self, folder: Path) -> None:
        self._path = folder / "tier"

    def healthy(self) -> bool:
        return self._path is not None and self._path.parent.is_dir()

    def stop(self) -> None:
        """Nothing runs; the folder is the caller's."""

    def adapter_settings(self) -> dict[str, object]:
        assert self._path is not None
        return {"path": self._path}

    @classmethod
    def at(cls, endpoint: str) -> Disk:
        """A directory of the user's own."""
        disk = cls()
        disk._path = Path(endpoint).absolute() / "lmcache-matrix"
        return disk
