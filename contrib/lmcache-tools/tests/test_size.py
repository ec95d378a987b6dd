"""`lmcache-core size` computes what a model's KV takes, from its config or from its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.cli.main import main
from lmcache_core.errors import UsageError
from lmcache_tools.size import config_of

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
def test_size_names_the_option_it_lacks(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
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


FALCON = {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 16, "hidden_size": 1024}
LAYERS_8 = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("config", "layers", "kv_heads"),
    [
        ({**FALCON, "multi_query": True}, 2, 1),
        ({**FALCON, "multi_query": False}, 2, 16),
        ({**FALCON, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 2, 8),
        ({"n_layer": 3, "n_head": 8, "n_embd": 512, "multi_query": True}, 3, 1),
        ({"n_layers": 3, "n_heads": 8, "d_model": 512, "attn_config": {"kv_n_heads": 2}}, 3, 2),
        ({"num_layers": 3, "num_attention_heads": 8, "kv_channels": 64, "multi_query_group_num": 2}, 3, 2),
        ({**LAYERS_8, "hybrid_override_pattern": "M-M*-M-*"}, 2, 2),
        ({**LAYERS_8, "full_attention_interval": 4, "linear_num_key_heads": 16}, 2, 2),
        ({**LAYERS_8, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2}, 2, 2),
        ({**LAYERS_8, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16}, 2, 2),
        ({**LAYERS_8, "layers_block_type": [*["mamba"] * 7, "hybrid"]}, 1, 2),
        ({**LAYERS_8, "attn_layer_indices": [3, 7], "mamba_d_state": 16}, 2, 2),
        ({**LAYERS_8, "block_types": ["recurrent", "recurrent", "attention"]}, 2, 2),
        ({**LAYERS_8, "linear_attn_config": {"full_attn_layers": [4, 8]}}, 2, 2),
    ],
)
def test_families_that_share_heads_or_mix_layers_count_what_they_keep(
    config: dict[str, Any], layers: int, kv_heads: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = asked(capsys, "--model", tmp_path)
    assert told["token_bytes"] == 2 * layers * kv_heads * 64 * 2
    assert told["upper_bound_why"] is None


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"sliding_window": 4096}, "sliding window"),
        ({"layer_types": [*["sliding_attention"] * 7, "full_attention"]}, "sliding window"),
        ({"mamba_d_state": 16}, "keep a state"),
    ],
)
def test_what_cannot_be_counted_is_an_upper_bound_and_says_so(
    odd: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LAYERS_8, **odd}))
    told = asked(capsys, "--model", tmp_path)
    assert told["token_bytes"] == 2 * 8 * 2 * 64 * 2
    assert why in told["upper_bound_why"]
    assert main(["size", "--model", str(tmp_path)]) == 0
    assert "an upper bound: " in capsys.readouterr().out


def test_a_terminal_of_ascii_shows_an_escape_for_what_it_lacks() -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "lmcache_core.cli.main", "size", "--help"]
    told = subprocess.run(command, env=environ, capture_output=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert rb"\xf7" in told.stdout


def test_a_configuration_that_is_nested_too_deeply_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="is not JSON"):
        config_of(tmp_path)
