"""Limits that a request brings along: what they allow, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_core.limits import ERROR_CHARS_MAX
from lmcache_core_vllm import request_params
from lmcache_core_vllm.request_params import UNLIMITED, RequestParams


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"kv_load_tiers": None}])
def test_without_own_names_nothing_is_limited(params: dict[str, Any] | None) -> None:
    assert RequestParams.of(params) == UNLIMITED
    assert UNLIMITED.load_end(100, 900) == 900
    assert UNLIMITED.store_end(900) == 900


def test_loads_are_limited_behind_what_the_engine_has_and_stores_from_the_first_token() -> None:
    params = RequestParams.of({"max_load_tokens": 64, "max_offload_tokens": 300})
    assert [params.load_end(100, limit) for limit in (120, 900)] == [120, 164]
    assert [params.store_end(tokens) for tokens in (299, 301)] == [299, 300]


def test_a_document_is_stored_as_a_chunk_if_the_request_says_so() -> None:
    assert RequestParams.of({"store_chunk": True}).store_chunk
    assert RequestParams.of({"store_chunk": False}) == UNLIMITED
    assert not RequestParams.of({"store_chunk": True, "max_load_tokens": -1}).store_chunk


@pytest.mark.parametrize(
    ("given", "tiers"),
    [
        ([], ()),
        ([{"medium": "CPU"}], ()),
        ([{"medium": "storage"}], None),
        ([{"medium": None}], None),
        ([{}], None),
        ([{"tier": "disk"}], ("disk",)),
        ([{"tier": "disk"}, {"medium": "cpu"}, {"tier": "far"}], ("disk", "far")),
        ([{"tier": "disk"}, {"medium": "STORAGE"}], None),
    ],
)
def test_tiers_are_chosen_by_name_or_by_the_medium_as_vllm_calls_it(given: Any, tiers: tuple[str, ...] | None) -> None:
    assert RequestParams.of({"kv_load_tiers": given}).tiers == tiers


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ("text", "kv_transfer_params is 'text': give an object"),
        ({"max_load_tokens": -1}, "max_load_tokens is -1: give a number of tokens, 0 or more"),
        ({"max_load_tokens": True}, "max_load_tokens is True"),
        ({"max_offload_tokens": "64"}, "max_offload_tokens is '64'"),
        ({"max_offload_tokens": 6.5}, "max_offload_tokens is 6.5"),
        ({"max_ofload_tokens": 0}, "did you mean 'max_offload_tokens'?"),
        ({"store_chunk": 1}, "store_chunk is 1: give true or false"),
        ({f"of another {number}": 1 for number in range(65)}, "has 65 names: at most 64"),
        ({"kv_load_tiers": [{"tier": "disk"}] * 65}, "kv_load_tiers has 65 entries: give 64 at most"),
        ({"store_chunks": True}, "did you mean 'store_chunk'?"),
        ({"kv_load_tiers": "disk"}, "kv_load_tiers is 'disk': give a list"),
        ({"kv_load_tiers": {"tier": "disk"}}, "give a list"),
        ({"kv_load_tiers": ["disk"]}, "kv_load_tiers has 'disk': give"),
        ({"kv_load_tiers": [{"tier": ""}]}, "names the tier ''"),
        ({"kv_load_tiers": [{"tier": "x" * 2000}]}, "names the tier 'xxx"),
        ({"kv_load_tiers": [{"tier": "\ud800"}]}, r"names the tier '\ud800'"),
        ({"kv_load_tiers": [{"medium": "TAPE"}]}, "has the medium 'TAPE': use CPU or STORAGE"),
        ({"kv_load_tiers": [{"medium": "STORAGE", "locality": "LOCAL"}]}, "where a tier lies is known only to"),
    ],
)
def test_bad_values_refuse_the_request_and_say_why(params: dict[str, Any], why: str) -> None:
    found = RequestParams.of(params)
    assert why in found.refused
    assert (found.load_end(100, 900), found.store_end(900), found.tiers) == (100, 0, ())


@pytest.mark.parametrize("name", ["lmcache_core_refused", "max_load_tokens"])
def test_what_a_client_sent_is_quoted_in_one_short_line_that_steers_nothing(name: str) -> None:
    refused = RequestParams.of({name: "\x1b[31m\nWARNING forged" + "x" * 1_000_000}).refused
    assert "forged" in refused
    assert refused.isprintable()
    assert len(refused) <= ERROR_CHARS_MAX


def test_a_long_name_is_not_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(request_params.difflib, "get_close_matches", lambda name, *more: compared.append(name) or [])
    assert RequestParams.of({"x" * 1_000_000: 1, "store_chunk": True}).store_chunk
    assert compared == ["x" * request_params.NAME_CHARS]
