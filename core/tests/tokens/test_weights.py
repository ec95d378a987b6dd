"""The fingerprint of weights: equal for equal content wherever it lies, another for any other."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.errors import UsageError
from lmcache_core.tokens import weights_fingerprint

LARGE, SMALL = 1 << 20, 64


def save(file: Path, *, values: int = 1, dtype: str = "F16", rows: int = LARGE // 2) -> Path:
    """A file of two tensors, of 1 MiB and 64 bytes."""
    header = {
        "__metadata__": {"format": "pt"},
        "large": {"dtype": dtype, "shape": [rows, LARGE // 2 // rows], "data_offsets": [0, LARGE]},
        "small": {"dtype": "F16", "shape": [SMALL // 2], "data_offsets": [LARGE, LARGE + SMALL]},
    }
    text = json.dumps(header).encode()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes([values]) * (LARGE + SMALL))
    return file


def put(file: Path, at: int, byte: int = 99) -> None:
    """Change one byte, counted from the end of the file, and leave size and times as they were."""
    said = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at, os.SEEK_END)
        opened.write(bytes([byte]))
    os.utime(file, ns=(said.st_atime_ns, said.st_mtime_ns))


@pytest.mark.parametrize("whole", [False, True])
def test_equal_weights_are_equal_under_other_names_and_times(tmp_path: Path, whole: bool) -> None:
    save(tmp_path / "a" / "model-1.safetensors")
    save(tmp_path / "a" / "model-2.safetensors", values=2)
    save(tmp_path / "b" / "x.safetensors", values=2)
    os.utime(save(tmp_path / "b" / "y.safetensors"), (0, 0))
    (tmp_path / "b" / "config.json").write_text("{}")  # no weights
    (tmp_path / "b" / "model.bin").write_bytes(b"left over from a conversion")
    assert weights_fingerprint(tmp_path / "a", whole=whole) == weights_fingerprint(str(tmp_path / "b"), whole=whole)


CHANGES: dict[str, Callable[[Path], object]] = {
    "the first value": lambda file: put(file, -LARGE - SMALL),
    "the last value of a large tensor": lambda file: put(file, -SMALL - 1),
    "any value of a small tensor": lambda file: put(file, -SMALL // 2),
    "a dtype": lambda file: save(file, dtype="BF16"),
    "a shape": lambda file: save(file, rows=4),
    "all values": lambda file: save(file, values=3),
    "another file beside it": lambda file: save(file.with_name("more.safetensors"), values=3),
    "an adapter's scale": lambda file: (file.parent / "adapter_config.json").write_text('{"lora_alpha": 8}'),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("whole", [False, True])
def test_a_change_is_seen_though_size_and_times_are_the_same(tmp_path: Path, change: str, whole: bool) -> None:
    file = save(tmp_path / "a" / "model.safetensors")
    before = weights_fingerprint(file.parent, whole=whole)
    assert weights_fingerprint(file.parent, whole=whole) == before
    CHANGES[change](file)
    assert weights_fingerprint(file.parent, whole=whole) != before


def test_what_lies_between_the_samples_shows_only_if_all_is_read(tmp_path: Path) -> None:
    file = save(tmp_path / "model.safetensors")
    samples, whole = weights_fingerprint(file), weights_fingerprint(file, whole=True)
    assert samples != whole
    put(file, -LARGE // 2 - SMALL)
    assert weights_fingerprint(file) == samples
    assert weights_fingerprint(file, whole=True) != whole


@pytest.mark.parametrize("name", ["model.bin", "model.gguf", "torn.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 5000, struct.pack("<Q", 4) + b"null" + bytes(5000)])
def test_other_formats_and_torn_files_are_read_whole(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    before = weights_fingerprint(tmp_path)
    shutil.copy(file, tmp_path / f"copy-{name}")
    both = weights_fingerprint(tmp_path)
    assert both != before
    file.write_bytes(content + b"x")
    assert weights_fingerprint(tmp_path) not in (before, both)


def test_a_link_into_a_store_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    """As the Hugging Face cache has it."""
    file = save(tmp_path / "blobs" / "0123")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(file)
    assert weights_fingerprint(snapshot) == weights_fingerprint(save(tmp_path / "c" / "a.safetensors").parent)


def test_a_folder_without_weights_is_refused_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no weights in"):
        weights_fingerprint(tmp_path)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        weights_fingerprint(tmp_path / "none")
