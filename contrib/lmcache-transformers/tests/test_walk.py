"""Every configuration class of the installed transformers: its models are proven exact, or refused in words.

The quick part asks every class, and proves models of each kind that there is. `nox -s transformers` proves every one of
them, for any version.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_core import Client
from lmcache_transformers.proven import PROVEN
from lmcache_transformers.support import refusal

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from proving import prove  # noqa: E402  # they need torch
from tiny_models import tiny_config, tiny_model  # noqa: E402

# Of each kind: plain, sliding windows, KV that layers share, latent attention, multi-query, ALiBi, learned positions,
# an encoder's class as a decoder, experts, sinks, configurations in parts.
QUICK = [
    *("llama", "mistral", "gemma3_text", "gemma3n_text", "deepseek_v3", "falcon", "bloom", "gpt2", "roberta"),
    *("qwen2_moe", "gpt_oss", "phi3", "mpt", "gpt_bigcode"),
]


def every_class() -> Iterator[tuple[str, type]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name in CONFIG_MAPPING.keys():  # noqa: SIM118  # it has keys() alone
        yield name, CONFIG_MAPPING[name]


def test_every_configuration_class_is_proven_or_refused_in_words() -> None:
    found: dict[str, list[str]] = {"proven": [], "refused": []}
    for name, kind in every_class():
        try:
            config = kind()
        except Exception:  # noqa: BLE001  # some cannot be made without parts of other models: composite, all of them
            config = None
        if config is None:
            assert kind.model_type not in PROVEN, name
            continue
        why = refusal(config)
        assert bool(why) or config.model_type in PROVEN
        assert not why or (repr(config.model_type) in why and len(why.split()) > 8), (name, why)
        found["refused" if why else "proven"].append(name)
    assert len(found["proven"]) > 90
    assert len(found["refused"]) > 600


@pytest.mark.parametrize("name", QUICK)
def test_a_model_of_each_kind_is_proven(client: Client, name: str) -> None:
    assert prove(client, tiny_model(_served(dict(every_class())[name])), name) == ""


def _served(kind: type) -> Any:
    """A small configuration that is not refused but for the list: encoders are configured as decoders."""
    config = tiny_config(kind)
    if "is_decoder" in refusal(config, unproven_ok=True):
        config = tiny_config(kind, is_decoder=True)
    return config


@pytest.mark.skipif("LMCACHE_TRANSFORMERS_WALK" not in os.environ, reason="takes minutes: nox -s transformers")
def test_the_list_of_what_is_proven_is_what_a_walk_over_all_models_finds(client: Client) -> None:
    proven = set()
    for _, kind in every_class():
        model_type = getattr(kind, "model_type", "")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config = _served(kind)
                if refusal(config, unproven_ok=True) or prove(client, tiny_model(config), f"walk {model_type}"):
                    continue
            except Exception:  # noqa: BLE001  # no model of this class can be made here, or it is refused when it is looked at
                continue
            finally:
                client.clear()
        proven.add(model_type)
    assert sorted(PROVEN - proven) == [], "no longer proven"
    assert sorted(proven - PROVEN) == [], "to be added"
