"""Prompts that one engine computes and another goes on with: what a request's `kv_transfer_params` say of it.

The names are those of vLLM's own connectors and of the routers for them: `do_remote_decode` at the engine that computes
the prompt, `do_remote_prefill` at the one that decodes, `transfer_id`, which is the same at both, and
`remote_num_tokens`: how many tokens of the prompt the first engine has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.request_params import NAMES

ENDED = "remote_prefill_ended"
ENDED_WAIT_S = 0.5  # for the last saves of an engine that has answered already


class Transfer(NamedTuple):
    """A prompt on its way between two engines. `id`: of the transfer. `wait_s`: how long the engine that decodes waits
    for the next block; 0 at the engine that computes. `tokens`: of how many the KV is in the pool, or on its way there,
    if the engine that computes has ended and says so: more does not come."""

    id: str
    wait_s: float
    tokens: int | None = None

    @property
    def computes(self) -> bool:
        """Whether this engine computes the prompt for another."""
        return not self.wait_s


def transfer_of(request: Any, config: ConnectorConfig) -> Transfer | None:
    """What the parameters of a vLLM request say; None: this engine computes, and decodes, by itself."""
    given = getattr(request, "kv_transfer_params", None)
    if not isinstance(given, Mapping):
        return None
    here, there = bool(given.get("do_remote_prefill")), bool(given.get("do_remote_decode"))
    if here == there:
        return None
    transfer_id = str(given.get("transfer_id") or given.get("remote_request_id") or request.request_id)
    if there:
        return Transfer(transfer_id, 0.0)
    longest_s = config.prefill_timeout_s
    if not given.get(ENDED):
        return Transfer(transfer_id, longest_s)
    tokens = given.get("remote_num_tokens")
    known = type(tokens) is int and tokens >= 0
    return Transfer(transfer_id, min(longest_s, ENDED_WAIT_S), tokens if known else None)


def answer_of(transfer: Transfer, request: Any, engine_id: str, tokens: int) -> dict[str, Any]:
    """What the engine that has computed a prompt answers: the parameters for the one that decodes, with the request's
    own limits, as routers send this in place of the client's. `tokens`: how many of the prompt it has stored."""
    given = request.kv_transfer_params
    return {name: given[name] for name in NAMES if name in given} | {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer.id,
        "remote_request_id": request.request_id,
        "remote_engine_id": engine_id,
        "remote_num_tokens": tokens,
        ENDED: True,
    }
