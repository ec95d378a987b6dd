"""The pages for operators and engine authors say what can be done: their commands, settings and code are run here.

`test_tutorial.py` runs the tutorials of plugins, lmcache-l0's own tests run those of L0, `test_docs.py` the README.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.client import explaining

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def fenced(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for named, block in blocks if named == language]


def command_line(*words: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "lmcache_core.cli.main", *words)
    env = os.environ | {"HOME": str(cwd), "XDG_RUNTIME_DIR": str(cwd)}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=True, **options)


def commands(block: str) -> list[list[str]]:
    """The words of each `lmcache-core` line, without its comment."""
    lines = block.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines if line.startswith("lmcache-core ")]
    return [[word for word in words[1:] if word != "&"] for words in split]


def test_an_operators_first_commands_run_in_the_order_of_the_page(tmp_path: Path) -> None:
    first = commands(fenced("operating/server.md", "sh")[0])
    assert [words[0] for words in first] == ["init", "check", "serve", "status", "status", "top"]
    command_line(*first[0], cwd=tmp_path)
    small = ["--l1.size_bytes", "16MiB", "--l1.backing", "memfd", "--runtime_dir", str(tmp_path / "run")]
    small += ["--state_dir", str(tmp_path / "state"), "--l2.disk.path", str(tmp_path / "disk")]
    said = command_line(*first[1], *small, cwd=tmp_path)
    assert "disk" in said.stdout
    server = subprocess.Popen(
        [sys.executable, "-m", "lmcache_core.cli.main", *first[2], *small],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert "ready" in server.stdout.readline()
        said = command_line(*first[3], "--json", "--runtime-dir", str(tmp_path / "run"), cwd=tmp_path)
        assert [tier["name"] for tier in json.loads(said.stdout)["tiers"]["tiers"]] == ["disk"]
        said = command_line(*first[5], "--runtime-dir", str(tmp_path / "run"), cwd=tmp_path)  # into a pipe: one frame
        assert said.stdout.startswith("lmcache-core default, serving")
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0


def test_the_settings_on_the_operators_page_are_settings(tmp_path: Path) -> None:
    (tmp_path / "lmcache.toml").write_text(fenced("operating/server.md", "toml")[0])
    found = json.loads(command_line("config", "--json", cwd=tmp_path).stdout)
    assert found["l2.disk.capacity_bytes"]["origin"] == "file"


def test_five_minutes_lead_to_the_hits_that_the_page_shows(node: Any, tmp_path: Path) -> None:
    install, serve = fenced("five-minutes.md", "sh")
    assert "pip install ./core ./plugins/lmcache-fs" in install
    flags = commands(serve)[0][1:]
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given.pop("--l1.size_bytes") == "32MiB"
    given["--l2.disk.path"] = given["--l2.disk.path"].replace("$PWD", str(tmp_path))
    options = [word for pair in given.items() for word in pair]
    shown = fenced("five-minutes.md", "")
    said = [re.sub(r"^\$ .*\n", "", shown[at], flags=re.MULTILINE) for at in range(3)]
    code = fenced("five-minutes.md", "python")[0]
    code = code.replace(".connect(", f".connect({node.name!r}, runtime_dir={str(node.run)!r}")

    def ask() -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    server = node.serve(*options, size="32MiB")
    assert ask() + ask() == said[0]
    server.kill()
    assert ask() == said[1]
    node.serve(*options, size="32MiB")
    assert ask() == said[2]
    words = shlex.split(shown[3].splitlines()[0].partition("| lmcache-core ")[2])
    tokens = " ".join(map(str, range(1280)))
    where = ["--name", node.name, "--runtime-dir", str(node.run)]
    assert command_line(*words, *where, cwd=tmp_path, input=tokens).stdout == shown[3].partition("\n")[2]


def test_every_figure_that_troubleshooting_names_stands_in_a_status(node: Any, tmp_path: Path) -> None:
    node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "disk"))
    where = ["--json", "--name", node.name, "--runtime-dir", str(node.run)]
    status = json.loads(command_line("status", *where, cwd=tmp_path).stdout)
    page = (DOCS / "operating/troubleshooting.md").read_text()
    named = set(re.findall(r"`((?:l1|pool|tiers|index)(?:\.[a-z_]+)+|longest_turn)`", page))
    settings = {"l1.access", "l1.backing", "l1.size_bytes"}
    assert len(named - settings) > 6
    for name in sorted(named - settings):
        found = status
        for part in name.split("."):
            assert part in found, f"`{name}` is no part of a status"
            found = found[part]
    words = {
        word for row in re.findall(r"^\| `explain`:(.*?)\|", page, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)
    }
    assert words
    assert words <= set(explaining.sentences())


def test_the_sizes_on_the_page_of_capacity_are_those_that_the_command_prints(tmp_path: Path) -> None:
    said = command_line(*commands(fenced("operating/capacity.md", "sh")[0])[0], cwd=tmp_path).stdout
    assert said == fenced("operating/capacity.md", "")[0]


STARTS_A_SERVER = ["README.md", "core/README.md", "docs/engines/vllm.md", "docs/engines/transformers.md"]


@pytest.mark.parametrize("page", STARTS_A_SERVER)
def test_the_servers_that_a_first_page_starts_take_those_flags(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    serves = [words for block in blocks for words in commands(block) if words[0] == "serve"]
    assert serves
    for words in serves:
        said = json.loads(command_line("config", *words[1:], "--json", cwd=tmp_path).stdout)
        assert said["l1.size_bytes"]["origin"] != "default"


def test_what_the_page_of_vllm_configures_is_what_its_engines_are_tested_with() -> None:
    """Those run in `nox -s vllm`: a prompt, a restart, the prompt again."""
    pages = ["engines/vllm.md", "../contrib/lmcache-core-vllm/README.md"]
    said = [
        json.loads(re.findall(r"--kv-transfer-config '(.*?)'", fenced(page, "sh")[0], re.DOTALL)[0]) for page in pages
    ]
    assert said[0] == said[1]
    driver = (ROOT / "contrib/lmcache-core-vllm/tests/engine/driver.py").read_text()
    for name, value in said[0].items():
        assert f'"{name}"' in driver
        assert f'"{value}"' in driver


@pytest.mark.slow
def test_the_page_of_transformers_leads_to_a_first_hit(node: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = tmp_path / "model"
    save_a_small_model(model, transformers)
    node.serve("--l1.backing", "memfd", size="64MiB")
    code = fenced("engines/transformers.md", "python")[0].replace('"Qwen/Qwen3-0.6B"', repr(str(model)))
    code = code.replace(".connect()", f".connect({node.name!r}, runtime_dir={str(node.run)!r})")
    code = f"document = 'In the beginning was the prefix. ' * 40\n{code}\nassert first.tokens_reused == (0,), first\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"without computing (256|512|768|1024|1280) tokens\n$", done.stdout), done.stdout


def save_a_small_model(folder: Path, transformers: Any) -> None:
    """In the place of the model that the page downloads: a Llama with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
