"""`lmcache-core quality` on a small model of random weights, saved to a folder as users have theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.cli.main import main
from lmcache_core.errors import SettingsError
from lmcache_core.serde.certificate import certificate_for

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("lmcache_compress")
pytest.importorskip("lmcache_quant._native", reason="built without C")

TEXT = " ".join(f"word{i * i % 97}" for i in range(400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Any]) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    words = {word: at for at, word in enumerate(["?", *sorted(set(TEXT.split()))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    make_model().save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


def quality(folder: Path, *options: str) -> int:
    common = ["--document", str(folder / "text.txt"), "--context", "40", "--predict", "16", "--chunk-tokens", "16"]
    return main(["quality", str(folder), *common, *options])


def test_a_lossless_chain_changes_nothing_and_fewer_bits_change_more(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quality(folder, "--serde", "identity", "zstd", "int8", "int4", "--windows", "3", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    chains = {each["chain"]: each for each in report["chains"]}
    assert report["windows"] == 3
    for name in ("identity", "zstd"):
        assert chains[name]["divergence"] == {"mean": 0, "deviation": 0}
        assert chains[name]["agreement"]["mean"] == 1
        assert chains[name]["perplexity"] == report["perplexity_unchanged"]
    assert 0 < chains["int8"]["divergence"]["mean"] < chains["int4"]["divergence"]["mean"] / 10
    assert chains["int4"]["size"] < chains["int8"]["size"] < chains["identity"]["size"] == 1
    assert chains["int8"]["serdes"] == [["int8", {"format": 1, "group_tokens": 64}]]


def test_a_certificate_is_read_as_the_server_reads_it(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    chains = ["int8:group_tokens=16,zstd", "zstd"]
    assert quality(folder, "--serde", *chains, "--windows", "1", "--certificate", str(file)) == 0
    lossy = [("int8", {"format": 1, "group_tokens": 16})]
    certificate = certificate_for(lossy, file, 1.0, 0.0, "l2.x.require_certificate")
    assert certificate.dtype == "bfloat16"
    assert [each.lossy for each in certificate.chains] == [lossy, []]
    with pytest.raises(SettingsError, match="certifies"):
        certificate_for([("int8", {"format": 1, "group_tokens": 64})], file, 1.0, 0.0, "l2.x.require_certificate")


def test_the_table_has_a_row_for_each_chain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quality(folder, "--serde", "int8", "int8,zstd", "--windows", "1") == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["chain", "unchanged", "int8", "int8,zstd"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--serde", "int7"], "int7"),
        (["--serde", "int8", "--context", "500"], "one window needs 517: give more text"),
        (["--serde", "int8", "--chunk-tokens", "64"], "shorter than one chunk of 64 tokens"),
        (["--serde", "zstd,int8"], "as the first serde of a chain"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    assert quality(folder, *options) != 0
    assert why in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    missing = main(["quality", str(tmp_path / "none"), "--document", str(tmp_path / "text.txt"), "--serde", "int8"])
    assert missing != 0
    assert "there is no folder" in capsys.readouterr().err
