"""`lmcache-core size` computes what a model's KV takes, from its config or from its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.cli.main import main

GROUPED = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
LATENT = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["size", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (GROUPED, 2 * 32 * 8 * 128 * 2),
        ({**GROUPED, "head_dim": 64, "dtype": "float32"}, 2 * 32 * 8 * 64 * 4),
        ({"model_type": "seen", "text_config": GROUPED}, 2 * 32 * 8 * 128 * 2),
        (LATENT, 61 * (512 + 64) * 2),
    ],
    ids=["grouped heads", "its own head size and dtype", "text beside images", "latent attention"],
)
def test_a_models_config_says_what_a_token_takes(
    config: dict[str, Any], token_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert asked(capsys, "--model", tmp_path)["token_bytes"] == token_bytes
    assert asked(capsys, "--model", tmp_path / "config.json")["token_bytes"] == token_bytes


def test_a_figure_that_is_given_stands_before_the_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GROUPED))
    assert asked(capsys, "--model", tmp_path, "--layers", 8, "--dtype", "int8")["token_bytes"] == 2 * 8 * 8 * 128


def test_pool_and_tier_hold_the_new_tokens_of_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--layers", 2, "--kv-heads", 2, "--head-size", 64, "--kv-shards", 2)
    traffic = ("--new-tokens", 100, "--l1-seconds", 10, "--tier-seconds", 1000, "--serde", 0.5, "--prompt-tokens", 256)
    told = asked(capsys, *model, *traffic, "--line", 1)
    assert told["token_bytes"] == 1024
    assert told["object_bytes"] == 1024 * 256 // 2
    assert told["object_on_tier_bytes"] == 1024 * 256 // 2 // 2 + 4096
    assert told["l1_bytes"] == 100 * 10 * 1024
    assert told["tier_bytes"] == 100 * 1000 * told["object_on_tier_bytes"] * 2 // 256
    assert told["prompt_bytes"] == 2 * told["object_on_tier_bytes"]
    assert told["prompt_line_s"] == pytest.approx(told["prompt_bytes"] * 8 / 1e9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "2"], "give --kv-heads, --head-size, or --model FILE"),
        (["--model", "/nowhere"], "cannot be read"),
        (["--layers", "0"], "must be a whole number of 1 or more, got '0'"),
        (["--layers", "many"], "must be a whole number of 1 or more, got 'many'"),
        (
            ["--layers", "2", "--kv-heads", "2", "--head-size", "64", "--serde", "0"],
            "must be a number above 0, got '0'",
        ),
        (["--new-tokens", "3k"], "must be a number above 0, got '3k'"),
    ],
)
def test_what_is_not_known_is_asked_for(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("odd", "asked_for"),
    [
        ({"num_hidden_layers": "32"}, "--layers"),
        ({"num_hidden_layers": -1}, "--layers"),
        ({"num_key_value_heads": [4, 4, 8]}, "--kv-heads"),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "--kv-heads, --head-size"),
    ],
    ids=["text", "negative", "heads by layer", "none"],
)
def test_a_config_that_says_it_otherwise_is_no_reason_to_guess(
    odd: dict[str, Any], asked_for: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GROUPED, **odd}))
    assert main(["size", "--model", str(tmp_path)]) == 2
    assert f"give {asked_for}, or" in capsys.readouterr().err


def test_a_latent_without_a_rotary_part_is_all_that_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LATENT, "qk_rope_head_dim": None}))
    assert asked(capsys, "--model", tmp_path)["token_bytes"] == 61 * 512 * 2
