"""Settings of one disk tier."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from lmcache_core.settings.paths import AbsolutePath


class FsSettings(BaseModel):
    """`[l2.NAME] type = "fs"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: AbsolutePath = Field(
        examples=["/var/cache/lmcache-core"],
        description="The directory. Created if it is missing; several servers may share one.",
    )
    mount_point: AbsolutePath | None = Field(
        default=None,
        examples=["/mnt/nvme"],
        description="Where the disk of PATH is mounted. While nothing is mounted there, the tier is not used: "
        "otherwise a server that starts before its disk is mounted fills the disk below.",
    )
    fsync: bool = Field(
        default=False,
        description="Sync each file and its directory before it is visible: survives a power cut, costs 1–6 ms an "
        "object. Without it a power cut can lose or damage recent objects, which then are misses.",
    )
    io_mode: Literal["auto", "direct", "buffered"] = Field(
        default="auto",
        description="How files are written and read. buffered: through the page cache, which serves warm loads ten "
        "times faster; direct: past it (O_DIRECT), which leaves memory alone; auto: buffered, but writes go direct "
        "while the machine is short of memory.",
    )
    damaged_files_max: int = Field(
        default=64, ge=0, description="Damaged files kept for inspection in PATH/damaged; beyond it they are deleted."
    )
