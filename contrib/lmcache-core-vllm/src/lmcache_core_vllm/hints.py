"""KV hints that come with a request (`KvHintsEnvelope`), passed on to the server, where the package `lmcache-hints`
executes them. No step waits for that, and no hint decides what the engine computes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmcache_core import Client
from lmcache_core.errors import CacheError, UsageError
from lmcache_core.guard import guarded
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm.groups import Group, boundary_step
from lmcache_core_vllm.namespaces import Hashing

log = logging.getLogger("vllm.lmcache_core")

OPERATION = "hints"
MESSAGES_WAITING_MAX = 16  # a server that is so far behind gets no later ones
KEYS_A_MESSAGE = 800  # a message is one frame of 64 KiB
ACTIONS_A_MESSAGE = 32
KEYS_MAX = 65_536  # of one request, in all namespaces: a million tokens in blocks of 16
REFUSED_PAUSE_S = 30.0  # after the server said that it executes no hints
OBJECTS = ("namespace", "namespace_digest", "keys", "block_hashes", "token_ids")
WITHOUT_OBJECTS = ("kv.release",)  # it names a message or a session

Json = dict[str, Any]


class HintSender:
    """Sends the hints of an engine's requests, one message after the other, in a thread that begins with the first."""

    def __init__(self, client: Client, groups: Sequence[Group], clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._groups = groups
        self._step_tokens = boundary_step(groups)
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lmcache-core-hints")
        self._begun = 0
        self._ended = 0  # of the thread alone
        self._closed = False
        self._silent_until = 0.0
        self._last_complaint = ""

    def send(
        self, envelope: Any, hashes: Sequence[bytes], hashing: Hashing | None, ranks: Sequence[Sequence[Namespace]]
    ) -> bool:
        """Send the envelope of a request with these block hashes soon; returns whether it will be. Its actions that
        name no objects mean the request's own whole blocks, of all groups and ranks. `hashing`: None if nothing of the
        request may be cached, so that such actions mean nothing."""
        waiting = self._begun - self._ended
        if self._closed or waiting >= MESSAGES_WAITING_MAX or self._clock() < self._silent_until:
            return False
        self._begun += 1
        given = hashes[: KEYS_MAX // max(1, len(self._groups) * len(ranks))]
        self._thread.submit(guarded, self._is_malformed, self._send, envelope, given, hashing, ranks)
        return True

    def _send(
        self, envelope: Any, hashes: Sequence[bytes], hashing: Hashing | None, ranks: Sequence[Sequence[Namespace]]
    ) -> None:
        self._ended += 1
        objects = [] if hashing is None else list(self._objects(hashes, hashing, ranks))
        for message in messages_of(plain(envelope), objects):
            if self._closed or not self._call(message):
                return

    def _objects(
        self, hashes: Sequence[bytes], hashing: Hashing, ranks: Sequence[Sequence[Namespace]]
    ) -> Iterator[Json]:
        """The request's blocks that an engine would load, in pages: what names them in a payload."""
        boundary = min(group.hashed_blocks(hashes) * group.block_tokens for group in self._groups)
        boundary -= boundary % self._step_tokens
        for group in self._groups:
            blocks = range(group.first_needed(boundary), boundary // group.block_tokens)
            chosen = group.block_hashes(hashes, blocks)
            for of_rank in ranks:
                namespace = of_rank[group.number]
                keys = hashing.keys(chosen, namespace)
                for first in range(0, len(keys), KEYS_A_MESSAGE):
                    yield _named(namespace, keys[first : first + KEYS_A_MESSAGE])

    def _call(self, message: Json) -> bool:
        """Returns whether further messages have a point."""
        try:
            reply = self._client.call_operation(OPERATION, message, dict[str, Any])
        except UsageError as error:
            if self._closed:  # and the client with it
                return False
            self._silent_until = self._clock() + REFUSED_PAUSE_S
            self._complain(f"KV hints are not executed (install lmcache-hints where the server runs): {error}")
            return False
        except CacheError as error:  # a server that is away, or slow: a hint is a hint
            log.debug("a KV hint was not passed on: %s", error)
            return False
        for outcome in reply["outcomes"]:
            if outcome["outcome"] == "rejected":
                self._complain(f"the server rejects a KV hint: {outcome['reason']}")
        return True

    def _is_malformed(self, error: BaseException) -> None:
        self._complain(f"a KV hint was not understood, and not passed on: {error!r}")

    def _complain(self, complaint: str) -> None:
        if complaint != self._last_complaint:
            log.warning("%s", complaint)
        self._last_complaint = complaint

    def close(self) -> None:
        """Drops what has not begun."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


def _named(namespace: Namespace, keys: Sequence[bytes]) -> Json:
    layout = namespace.layout
    return {
        "namespace": f"{namespace.id:016x}",
        "layout": {"dtype": layout.dtype, "shape": list(layout.shape), "memory_format": layout.memory_format},
        "keys": [key.hex() for key in keys],
    }


def plain(envelope: Any) -> Json:
    """What vLLM's class for an envelope has, in dicts and lists."""
    actions = [
        {
            "action_id": action.action_id,
            "action_type": action.action_type,
            "action_version": action.action_version,
            "payload": action.payload,
        }
        for action in envelope.actions
    ]
    return {"protocol_version": envelope.protocol_version, "message_id": envelope.message_id, "actions": actions}


def messages_of(envelope: Json, objects: Sequence[Json]) -> Iterator[Json]:
    """The envelope, with `objects` in the actions that name none; in as many messages as that takes. The first has its
    id, further ones `ID/1`, `ID/2`, …"""
    number, actions, keys = 0, list[Json](), 0
    for action in _actions(envelope["actions"], objects):
        count = len(action["payload"].get("keys", ()))
        if actions and (keys + count > KEYS_A_MESSAGE or len(actions) == ACTIONS_A_MESSAGE):
            yield _message(envelope, number, actions)
            number, actions, keys = number + 1, [], 0
        actions.append(action)
        keys += count
    yield _message(envelope, number, actions)


def _message(envelope: Json, number: int, actions: list[Json]) -> Json:
    message_id = f"{envelope['message_id']}/{number}" if number else envelope["message_id"]
    return {**envelope, "message_id": message_id, "actions": actions}


def _actions(given: Iterable[Json], objects: Sequence[Json]) -> Iterator[Json]:
    for action in given:
        payload = action["payload"]
        if action["action_type"] in WITHOUT_OBJECTS or any(name in payload for name in OBJECTS):
            yield action
            continue
        for number, each in enumerate(objects):
            action_id = f"{action['action_id']}/{number}" if number else action["action_id"]
            yield {**action, "action_id": action_id, "payload": {**payload, **each}}
