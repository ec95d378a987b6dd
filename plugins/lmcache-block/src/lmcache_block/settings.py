"""Settings of one block tier."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lmcache_block.medium.format import BLOCK_BYTES, EXTENT_BYTES_MAX, EXTENT_BYTES_MIN, default_extent_bytes
from lmcache_core.settings.paths import AbsolutePath
from lmcache_core.settings.sizes import Size


class BlockSettings(BaseModel):
    """`[l2.NAME] type = "block"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: AbsolutePath = Field(
        examples=["/dev/disk/by-id/nvme-EXAMPLE", "/var/cache/lmcache-core.block"],
        description="A file, or a block device that nothing else uses. One server at a time uses it.",
    )
    size_bytes: Size | None = Field(
        default=None,
        ge=4 << 20,
        examples=["200GiB"],
        description="How large a new file is made. Without it the file must be there already, so that nothing is "
        "made below a disk that is not mounted. Has no meaning for a device.",
    )
    extent_bytes: Size | None = Field(
        default=None,
        ge=EXTENT_BYTES_MIN,
        le=EXTENT_BYTES_MAX,
        description="How much space a size class takes at a time, and nearly the largest object. Read when the medium "
        "is formatted. None: 257 MiB, less on media below 17 GiB.",
    )
    io_mode: Literal["direct", "buffered"] = Field(
        default="direct",
        description="direct: past the page cache (O_DIRECT); where the file system refuses that, the tier fails and "
        "says so. buffered: through the page cache.",
    )
    fsync: bool = Field(
        default=True,
        description="Sync payloads before the headers that name them, once a batch: a power cut loses the last batch "
        "at most. Without it a power cut can also damage recent objects, which then are misses.",
    )
    trim: bool = Field(
        default=False,
        description="Discard extents that become empty: on a device the blocks, in a file a hole, whose space other "
        "files may take then.",
    )
    bounce_buffers: int = Field(
        default=4,
        ge=1,
        le=256,
        description="Buffers of 1 MiB for objects whose memory O_DIRECT does not take as it is, such as encoded ones.",
    )

    @model_validator(mode="after")
    def _in_blocks(self) -> Self:
        for name in ("size_bytes", "extent_bytes"):
            nbytes = getattr(self, name)
            if nbytes is not None and nbytes % BLOCK_BYTES:
                raise ValueError(f"{name} must be a multiple of {BLOCK_BYTES} bytes, got {nbytes}")
        return self

    @property
    def new_extent_bytes(self) -> int | None:
        """Of a medium that is formatted with these settings. None: it depends on the device."""
        if self.extent_bytes is None and self.size_bytes is not None:
            return default_extent_bytes(self.size_bytes)
        return self.extent_bytes
