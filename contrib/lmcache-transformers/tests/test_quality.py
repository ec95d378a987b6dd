"""`lmcache-core quality` on a small model of random weights, saved to a folder as users have theirs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import Client
from lmcache_core.cli.main import main
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.serde.certificate import certificate_for

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("lmcache_compress")
pytest.importorskip("lmcache_quant._native", reason="built without C")

from lmcache_transformers import Blending, CachedGenerator  # noqa: E402  # they need torch

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


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("what", [["--serde", "zstd", "--windows", "1"], ["--blend", "0.25"]])
def test_a_model_that_computes_no_numbers_is_not_certified(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: list[str], value: float
) -> None:
    pytest.importorskip("lmcache_blend._native", reason="built without C")
    broken, file, outcomes = tmp_path / "broken", tmp_path / "certificate.json", tmp_path / "outcomes.jsonl"
    shutil.copytree(folder, broken)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[3, 0] = value
    model.save_pretrained(broken)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"documents": [TEXT[:200], TEXT[300:500]], "question": "word1"}))
    if "--blend" in what:
        what = [*what, "--prompts", str(tmp_path / "prompts.jsonl"), "--answer", "4", "--outcomes", str(outcomes)]
    else:
        what = [*what, "--document", str(folder / "text.txt"), "--context", "40", "--predict", "16"]
    what = [*what, "--chunk-tokens", "16"]
    assert main(["quality", str(broken), *what, "--certificate", str(file)]) != 0
    assert "the model computes NaN or infinite numbers, and such answers are not certified" in capsys.readouterr().err
    assert not file.exists()
    assert not outcomes.exists() or not outcomes.read_bytes()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    missing = main(["quality", str(tmp_path / "none"), "--document", str(tmp_path / "text.txt"), "--serde", "int8"])
    assert missing != 0
    assert "there is no folder" in capsys.readouterr().err


def test_a_certificate_of_blending_is_what_generators_demand(
    folder: Path, tmp_path: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lmcache_blend._native", reason="built without C")
    file, prompts = tmp_path / "certificate.json", tmp_path / "prompts.jsonl"
    words = TEXT.split()
    lines = [
        {"documents": [" ".join(words[at : at + 48]), " ".join(words[200 : 240 + at])], "question": words[at]}
        for at in (0, 9)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    common = ["--chunk-tokens", "16", "--prompts", str(prompts), "--answer", "4", "--dtype", "float32"]
    shares = ["--blend", "0", "0.25", "1"]
    assert main(["quality", str(folder), *common, *shares, "--certificate", str(file), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["chains"]
    assert [row["lossy"][0][1]["share"] for row in rows] == [0, 0.25, 1]
    assert rows[2]["divergence"]["mean"] < 1e-6
    assert rows[2]["agreement"]["mean"] == rows[2]["same_answer"]["mean"] == 1
    assert rows[0]["divergence"]["mean"] > rows[1]["divergence"]["mean"] > 1e-6
    assert rows[0]["deviation"]["mean"] > rows[1]["deviation"]["mean"] > rows[2]["deviation"]["mean"] == 0
    assert [(part["kind"], part["prompts"]) for part in rows[0]["parts"]] == [("own", 2)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def make(share: float, of: Any = model, head: int = 6, longest: int = 16, **limits: float) -> CachedGenerator:
        how = Blending(share, tuple(range(head)), minimum=8, mean=16, maximum=longest, **limits)
        return CachedGenerator(of, None, client, certificate=file, reuse="blend", blending=how)

    make(1.0)
    make(0.25, divergence_max=1e9, agreement_min=0)
    with pytest.raises(SettingsError, match="changes the answers of"):
        make(0.25, divergence_max=1e-9)
    with pytest.raises(SettingsError, match="certifies"):
        make(0.5)
    make(1.0, head=9)
    with pytest.raises(SettingsError, match="certifies"):
        make(1.0, head=5)  # it was measured behind six tokens, which take what all others attend to
    with pytest.raises(SettingsError, match="certifies"):
        make(1.0, longest=17)
    with pytest.raises(UsageError, match="is for KV in float32"):
        make(1.0, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval())
    other = tmp_path / "revision"
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(other)
    with pytest.raises(UsageError, match="is for the model"):
        make(1.0, transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval())


def test_a_measurement_goes_on_where_it_was_killed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lmcache_blend._native", reason="built without C")
    from lmcache_transformers.quality.blending import Trial

    words, prompts, file = TEXT.split(), tmp_path / "prompts.jsonl", tmp_path / "outcomes.jsonl"
    lines = [{"documents": [" ".join(words[at : at + 40])] * 2, "question": words[at]} for at in range(3)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ["--chunk-tokens", "8", "16", "--prompts", str(prompts), "--answer", "2", "--outcomes", str(file)]
    runs, run = [], Trial.run

    def counted(self: Trial, cut: Any, shares: Any) -> Any:
        runs.append(cut)
        if len(runs) == 4:
            raise MemoryError
        return run(self, cut, shares)

    monkeypatch.setattr(Trial, "run", counted)
    quality_of = ["quality", str(folder), *options, "--blend", "0.25", "--json"]
    with pytest.raises(MemoryError):
        main(quality_of)
    assert file.read_bytes().count(b"\n") == 3
    file.write_bytes(file.read_bytes() + b'{"digest": "torn')  # as of a process that was killed while it wrote
    capsys.readouterr()
    assert main(quality_of) == 0
    assert len(runs) == 4 + 3
    first = json.loads(capsys.readouterr().out)["chains"]
    assert [row["prompts"] for row in first] == [3, 3]
    assert main(quality_of) == 0
    assert len(runs) == 7
    assert json.loads(capsys.readouterr().out)["chains"] == first
    assert main([*quality_of, "--prefix-tokens", "2"]) == 0  # something else is measured, from the beginning
    assert len(runs) == 13
    row = json.loads(capsys.readouterr().out)["chains"][0]
    assert row["lossy"][0][1]["prefix_tokens"] == 2
    assert row["divergence"] != first[0]["divergence"]
    assert main([*quality_of, "--prefix-tokens", "99"]) != 0
    assert "a prompt begins with 6 tokens" in capsys.readouterr().err
    file.write_bytes(b"no line of ours\n" + file.read_bytes())
    assert main(quality_of) != 0
    assert "line 1" in capsys.readouterr().err
    file.write_bytes(b'{"somebody": "else"}')  # one line without an end, as a program writes its settings
    assert main(quality_of) != 0
    assert "has another content than outcomes" in capsys.readouterr().err
    assert file.read_bytes() == b'{"somebody": "else"}'


def test_prompts_that_are_shorter_than_two_sizes_count_for_both(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lmcache_blend._native", reason="built without C")
    words, prompts, file = TEXT.split(), tmp_path / "prompts.jsonl", tmp_path / "outcomes.jsonl"
    prompts.write_text(json.dumps({"documents": [" ".join(words[:30]), " ".join(words[40:70])], "question": "word1"}))
    options = ["quality", str(folder), "--prompts", str(prompts), "--answer", "2", "--blend", "0.25", "--json"]
    assert main([*options, "--chunk-tokens", "64", "128", "--outcomes", str(file)]) == 0
    both = json.loads(capsys.readouterr().out)["chains"]
    assert [row["prompts"] for row in both] == [1, 1]
    assert file.read_bytes().count(b"\n") == 1  # cut alike: measured once
    assert main([*options, "--chunk-tokens", "96", "--outcomes", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["chains"][0]["divergence"] == both[0]["divergence"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "give --serde or --blend"),
        (["--serde", "int8"], "give --document"),
        (["--blend", "0.1", "--prompts", "none.jsonl"], "none.jsonl cannot be read"),
        (["--blend", "0.1", "--chunk-tokens", "4096"], "no prompt with chunks of 4096 tokens fits"),
        (["--blend", "0.1", "--chunk-tokens", "8", "--outcomes", "/nowhere/file"], "/nowhere/file cannot be written"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    pytest.importorskip("lmcache_blend._native", reason="built without C")
    assert main(["quality", str(folder), *options]) != 0
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2"),
        ("[]", "give documents, a list of texts"),
        ('{"documents": [], "question": "?"}', "give documents, a list of texts"),
        ('{"documents": ["a"]}', "and question, a text"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, why: str) -> None:
    from lmcache_transformers.quality.prompts import read_prompts

    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"documents": ["a", "b"], "question": "c?"}}\n{line}\n')
    with pytest.raises(UsageError, match=f"line 2.*{why}|{why}"):
        read_prompts(file)
    file.write_text("\n")
    with pytest.raises(UsageError, match="has no prompt"):
        read_prompts(file)


def test_shipped_prompts_are_the_same_each_time_and_long_enough() -> None:
    from lmcache_transformers.quality.prompts import KINDS, make_prompts, shipped

    texts = shipped()
    assert sum(len(each.entries) for each in texts) > 300
    assert {each.licence for each in texts} <= {"PSF-2.0", "verbatim copies permitted"}
    for kind in KINDS:
        prompts = make_prompts(texts, kind, 3, 4, 128)
        assert prompts == make_prompts(texts, kind, 3, 4, 128)
        assert len(set(prompts)) == 3
        for prompt in prompts:
            chunks = prompt.chunks(lambda text: list(text.encode()[::4]), 128)
            assert [len(chunk) for chunk in chunks] == [128] * 4
    with pytest.raises(UsageError, match="give your own"):
        make_prompts(texts, "continued", 1, 16, 1 << 20)
