"""The disk: a directory in the temporary folder."""

from __future__ import annotations

from pathlib import Path

from lmcache_fs.transport.paths import Paths
from lmcache_testing import Backdoor
from services.service import Service


class DiskDoor(Backdoor):
    """The file of a key."""

    def __init__(self, root: Path) -> None:
        self._paths = Paths(root)

    def read(self, key: bytes) -> bytes | None:
        path = self._path(key)
        return path.read_bytes() if path.exists() else None

    def write(self, key: bytes, content: bytes) -> None:
        self._path(key).write_bytes(content)

    def remove(self, key: bytes) -> None:
        self._path(key).unlink()

    def _path(self, key: bytes) -> Path:
        return Path(self._paths.object(key))


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

    # --- for the conformance kit ----------------------------------------------------------------------------
    def corner(self, label: str) -> dict[str, object]:
        assert self._path is not None
        return {"path": self._path.parent / "corners" / label}

    def backdoor(self, corner: dict[str, object]) -> Backdoor:
        return DiskDoor(Path(str(corner["path"])))

    @classmethod
    def at(cls, endpoint: str) -> Disk:
        """A directory of the user's own."""
        disk = cls()
        disk._path = Path(endpoint).absolute() / "lmcache-matrix"
        return disk
