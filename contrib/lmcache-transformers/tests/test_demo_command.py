from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core.errors import UsageError
from lmcache_transformers.demo import command
from lmcache_transformers.demo.model import document_tokens, write_document


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lmcache-core")
    command.add_command(parser.add_subparsers())
    return parser.parse_args(["demo", *words])


def test_the_options_have_defaults_that_show_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse()
    assert (options.answer_tokens, options.model, options.json) == (24, "auto", False)
    with pytest.raises(SystemExit):
        parse("--help")
    out, _ = capsys.readouterr()
    assert "(default: 24)" in out
    assert "--layers" in out


@pytest.mark.parametrize("wrong", ["0", "-3", "many"])
def test_a_length_that_is_no_length_is_refused(wrong: str) -> None:
    with pytest.raises(SystemExit):
        parse("--tokens", wrong)


def test_the_plugin_and_its_help_import_nothing_heavy() -> None:
    program = (
        "import argparse, sys\n"
        "from lmcache_transformers import plugin\n"
        "plugin.lmcache_add_commands(argparse.ArgumentParser().add_subparsers())\n"
        "assert not {'torch', 'transformers', 'pydantic', 'zmq'} & set(sys.modules), sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("model", "needed"),
    [("smollm2", "torch transformers gguf accelerate"), ("random", "torch transformers"), ("none", "numpy")],
)
def test_a_missing_package_is_named_with_what_to_install(
    model: str, needed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.run(parse("--model", model)) == 2
    _, err = capsys.readouterr()
    assert f"pip install {needed} ./plugins/lmcache-fs" in err


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (("torch", "transformers", "gguf", "accelerate"), "smollm2"),
        (("torch", "transformers"), "random"),
        (("torch",), "none"),
    ],
)
def test_the_model_is_the_best_that_what_is_installed_allows(
    there: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: name if name in (*there, "numpy") else None)
    options = parse()
    assert command.run(options) == 2  # lmcache_fs is missing here
    assert options.model == chosen


def test_a_document_is_the_first_bytes_of_a_text(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(200)))
    path = write_document(tmp_path, 100, str(source))
    assert document_tokens(str(path)) == list(range(100))
    with pytest.raises(UsageError, match="has 200 tokens and 201"):
        write_document(tmp_path, 201, str(source))


def test_without_a_source_the_document_is_long_enough_for_the_default(tmp_path: Path) -> None:
    assert len(document_tokens(str(write_document(tmp_path, 100_000)))) == 100_000


def test_a_folder_with_an_earlier_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lmcache_transformers.demo.steps import demonstrate

    (tmp_path / "disk").mkdir()
    options = parse(
        "--keep", str(tmp_path), "--model", "random", "--layers", "8", "--tokens", "4096", "--chunk-tokens", "256"
    )
    assert demonstrate(options) == 1
    out, _ = capsys.readouterr()
    assert "is not empty" in out
    assert "ok: no" in out
