"""The scheduler's side: which blocks a request need not compute, and which blocks each step has made.

In a step, all requests together wait for the server at most `step_wait_s`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from lmcache_core.client.client import Client
from lmcache_core.errors import CacheError
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.counters import Counters
from lmcache_core_vllm.groups import Group, Kind, boundary_step
from lmcache_core_vllm.lookups import Bounds, Found, Lookup, Question
from lmcache_core_vllm.messages import Messages
from lmcache_core_vllm.namespaces import Hashing, RankFacts, introduce, namespaces_of
from lmcache_core_vllm.patience import Patience
from lmcache_core_vllm.reports import Reports
from lmcache_core_vllm.steps import STEPS_AHEAD, Blocks, Load, Step

log = logging.getLogger("vllm.lmcache_core")

ANSWER_KEPT_S = 5.0  # after this, a request that found no room in the engine is looked up again


class Request(Protocol):
    """The fields of vLLM's request that are used here."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    lora_request: Any
    skip_reading_prefix_cache: bool


class Tracked:
    """A request that the engine has."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.question: Question | None = None  # the last one
        self.lookup: Lookup | None = None
        self.found: Found | None = None
        self.loaded: Found | None = None  # what is being loaded
        self.computed = 0  # what the engine had when it got `found`
        self.vetoed = False  # a load for it has failed
        self.loading = False  # between steps
        self.saved: dict[int, int] = {}  # by group, the block up to which all are stored, or have been offered


class SchedulerSide:
    """One engine's requests, and what the cache has of them."""

    def __init__(
        self,
        config: ConnectorConfig,
        groups: Sequence[Group],
        client: Client,
        hashing: Callable[[], Hashing],
        *,
        loads: bool = True,
        saves: bool = True,
        waits: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hashing`: how block hashes are made, known with the first request. `waits`: loads are synchronous."""
        self._config = config
        self.groups = groups
        self.client = client
        self._hashing = hashing
        self._loads = loads
        self._saves = saves
        self._waits = waits
        self._clock = clock
        self.namespaces: list[list[Namespace]] = []  # of each rank those of its groups
        self.tracked: dict[str, Tracked] = {}
        self._pending: list[Load] = []
        self._awaited: dict[str, Load] = {}  # by request: sent to the workers, not yet reported as ended
        self._load_number = 0
        self._messages = Messages(client)
        self._reports = Reports(client, self._messages, hashing, config.report_token_ids)
        # whose loads each step waits for; the last one is the next step
        self._step_loads: deque[list[Tracked]] = deque([[]])
        self._epoch = 0
        self._steps = 0  # made so far
        self._waited_s = 0.0  # in this step
        self._patience = Patience(config.retry_s, clock)
        self._step_tokens = boundary_step(groups)
        self.counters = Counters()

    def know_ranks(self, ranks: Iterable[RankFacts]) -> None:
        """The workers' facts; before they arrive nothing is looked up."""
        shards = {rank.shard: rank for rank in ranks}
        self.namespaces = [namespaces_of(shards[shard], self._config.salt) for shard in sorted(shards)]
        introduce(self.client, (each for namespaces in self.namespaces for each in namespaces))

    # --- before a request is scheduled ----------------------------------------------------------------------

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond the `computed` ones can be loaded, and whether between steps. None: ask again."""
        tracked = self._tracked(request)
        tracked.computed = computed
        if not self._loads or tracked.vetoed or not self.namespaces or request.skip_reading_prefix_cache:
            self.counters.add("lookup_vetoed", tracked.vetoed)
            return 0, False
        found = tracked.found
        if found is not None and not self._still_holds(found, tracked, computed):
            self._forget_answer(tracked)
            found = None
        if found is None:
            found = tracked.found = self._ask(tracked, computed)
        if found is None:
            return None, False
        tokens = max(0, found.boundary - computed)
        if not tokens and found.promises:
            self._messages.give_back(found.numbers)
            tracked.found = found._replace(promises=())
        return tokens, bool(tokens) and not self._waits

    def _still_holds(self, found: Found, tracked: Tracked, computed: int) -> bool:
        """Blocks that no promise holds are looked up in the index again each time, which makes no call."""
        now = self._clock()
        if now - found.at_s >= ANSWER_KEPT_S or now >= found.expires_at:
            return False
        if found.tokens != tracked.request.num_tokens or computed < found.start:
            return False
        if found.promises or found.boundary <= computed or tracked.question is None:
            return True
        return tracked.question.by_index(self.client, now).boundary == found.boundary

    def _forget_answer(self, tracked: Tracked) -> None:
        if tracked.found is not None:
            self._messages.give_back(tracked.found.numbers)
            tracked.found = None

    def _ask(self, tracked: Tracked, computed: int) -> Found | None:
        """The answer: from the index, if it has everything, or the server cannot be asked; else from the server. None:
        not yet."""
        request, lookup = tracked.request, tracked.lookup
        if lookup is None:
            bounds = Bounds(computed, self._limit(request), request.num_tokens)
            if bounds.limit <= computed:
                return Found(computed, computed, request.num_tokens, self._clock())
            hashing, trace = self._hashing(), _trace_of(request)
            question = Question(self.groups, self.namespaces, hashing, request.block_hashes, bounds, trace)
            tracked.question = question
            had = question.by_index(self.client, self._clock())
            if had.boundary == bounds.limit or self._patience.over:
                self._count(had, bounds)
                return had
            wait_s = self._config.lookup_timeout_s / 2
            lookup = tracked.lookup = Lookup(self.client, question, had, wait_s, self._clock)
        found = self._answer_of(lookup)
        if found is not None:
            tracked.lookup = None
            self._count(found, lookup.bounds)
        return found

    def _answer_of(self, lookup: Lookup) -> Found | None:
        """The server's answer, if it comes within this step's wait; else what the index has."""
        if not lookup.done and (left := self._config.step_wait_s - self._waited_s) > 0:
            began = self._clock()
            lookup.wait(left)
            self._waited_s += self._clock() - began
        if lookup.done:
            self._patience.answered()
            self._messages.give_back(lookup.outdated)
            return lookup.found
        if self._clock() - lookup.began_s <= self._config.lookup_timeout_s:
            return None
        self._messages.give_back(lookup.cancel())
        self._patience.waited_in_vain()
        self.counters.add("lookup_timeouts")
        return lookup.by_index

    def _limit(self, request: Request) -> int:
        """The last boundary that leaves a token to compute, and whose blocks have hashes."""
        hashed = min(group.hashed_blocks(request.block_hashes) * group.block_tokens for group in self.groups)
        limit = min(hashed, request.num_tokens - 1)
        return limit - limit % self._step_tokens

    def _count(self, found: Found, bounds: Bounds) -> None:
        add = self.counters.add
        add("lookup_requests")
        add("lookup_hit_tokens", found.boundary - found.start)
        add("lookup_missed_tokens", bounds.limit - found.boundary)
        add("lookup_unreachable", not found.reachable)
        add("lookup_held", bool(found.promises))

    def allocated(self, request: Request, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """The engine has made room: `external` tokens are to be loaded, into these blocks."""
        tracked = self._tracked(request)
        found = tracked.found
        if external <= 0 or found is None:
            return
        tracked.found = None
        start, boundary = tracked.computed, tracked.computed + external
        blocks = []
        for group in self.groups:
            end = boundary // group.block_tokens
            first = max(start // group.block_tokens, group.first_needed(boundary))
            hashes = group.block_hashes(request.block_hashes, first, end)
            ids = list(block_ids[group.number][first:end])
            blocks.append(Blocks(group.number, hashes, ids, found.promises_of(group, first, end)))
            self._report(request, group, range(first, end))
            tracked.saved[group.number] = end
        tracked.loading = not self._waits
        self._forget_load(tracked)
        tracked.loaded = found
        if self._waits:
            self._step_loads[-1].append(tracked)
        self._load_number += 1
        self._pending.append(Load(request.request_id, self._waits, blocks, self._load_number))

    def from_tiers(self, request: Request, external: int) -> int:
        """How many of the tokens to load tiers had to load into the pool first."""
        tracked = self.tracked.get(request.request_id)
        loaded = None if tracked is None else tracked.loaded
        return 0 if loaded is None else min(external, loaded.from_tiers)

    # --- each step --------------------------------------------------------------------------------------------

    def step(self, output: Any) -> Step:
        """What the workers are to do in the step that vLLM's `SchedulerOutput` describes."""
        self._waited_s = 0.0
        self._steps += 1
        made = Step(self._hashing(), self._epoch, self._steps, idle=not output.total_num_scheduled_tokens)
        made.awaited = list(self._awaited.values())
        made.loads, self._pending = self._pending, []
        self._awaited |= {load.request_id: load.without_hashes() for load in made.loads if not load.waits}
        self._give_back_ended()
        if self._saves and self.namespaces:
            state = output.kv_connector_block_state
            for request_id, computed in _computed_after(output).items():
                tracked = self.tracked.get(request_id)
                table = None if state is None else state.get_block_ids(request_id)
                if tracked is not None and table is not None:
                    made.saves += self._blocks_made(tracked, table, computed)
            if state is not None:
                made.saves += self._states_made(state.boundary_state_offloads)
        return made

    def _give_back_ended(self) -> None:
        """Promises of synchronous loads that have ended by now."""
        self._step_loads.append([])
        if len(self._step_loads) > 1 + STEPS_AHEAD:
            for tracked in self._step_loads.popleft():
                self._forget_load(tracked)

    def _blocks_made(self, tracked: Tracked, table: Sequence[Sequence[int]], computed: int) -> list[Blocks]:
        """Blocks that this step fills."""
        request = tracked.request
        if not self._config.save_generated:
            computed = min(computed, request.num_prompt_tokens)
        made = []
        for group in self.groups:
            if group.kind is Kind.STATE:
                continue
            first = tracked.saved.get(group.number)
            if first is None:
                first = tracked.saved[group.number] = self._had(request, group)
            end = min(computed // group.block_tokens, group.hashed_blocks(request.block_hashes))
            if end <= first:
                continue
            tracked.saved[group.number] = end
            hashes = group.block_hashes(request.block_hashes, first, end)
            ids = list(table[group.number][first:end])
            there = [at for at, block in enumerate(ids) if block]  # blocks that have left the window are block 0
            if there:
                chosen = [hashes[at] for at in there], [ids[at] for at in there]
                made.append(Blocks(group.number, *chosen, traceparent=_trace_of(request)))
                self._report(request, group, [first + at for at in there])
        return made

    def _report(self, request: Request, group: Group, blocks: Sequence[int]) -> None:
        namespace = self.namespaces[0][group.number]
        self.counters.add("report_dropped_blocks", self._reports.tell(request, group, blocks, namespace))

    @staticmethod
    def _had(request: Request, group: Group) -> int:
        """Blocks that the engine had of a request before it first ran."""
        return request.num_computed_tokens // group.block_tokens

    def _states_made(self, offers: Mapping[str, Sequence[tuple[int, int, int]]]) -> list[Blocks]:
        """States that end on a boundary: vLLM says which block holds each after this step."""
        made = []
        for request_id, states in offers.items():
            tracked = self.tracked.get(request_id)
            for number, block_id, boundary in states:
                group = self.groups[number]
                if tracked is None or not block_id or boundary % group.block_tokens:
                    continue
                block = boundary // group.block_tokens - 1
                hashes = tracked.request.block_hashes
                if block < group.hashed_blocks(hashes) and self._wanted(tracked.request, boundary):
                    trace, last = _trace_of(tracked.request), group.block_hashes(hashes, block, block + 1)
                    made.append(Blocks(number, last, [block_id], traceparent=trace))
                    self._report(tracked.request, group, [block])
        return made

    def _wanted(self, request: Request, boundary: int) -> bool:
        return self._config.save_generated or boundary <= request.num_prompt_tokens

    # --- after it -----------------------------------------------------------------------------------------------

    def heard(self, received: Iterable[str], failed: Iterable[str], invalid: Iterable[int]) -> None:
        """The workers' reports: loads that ended, those of them that failed, and blocks without valid KV. By then vLLM
        has moved the requests back, so everything after this is computed over sound blocks.
        """
        invalid = set(invalid)
        for request_id in failed:
            self._veto(request_id)
        for request_id in received:
            self._awaited.pop(request_id, None)
            tracked = self.tracked.get(request_id)
            if tracked is not None:
                tracked.loading = False
                self._forget_load(tracked)
                if invalid:
                    self._move_back(tracked)
        if invalid:
            self._epoch += 1
            for tracked in self.tracked.values():
                if not tracked.loading:
                    self._move_back(tracked)

    def _forget_load(self, tracked: Tracked) -> None:
        if tracked.loaded is not None:
            self._messages.give_back(tracked.loaded.numbers)
            tracked.loaded = None

    def _veto(self, request_id: str) -> None:
        tracked = self.tracked.get(request_id)
        if tracked is not None:
            tracked.vetoed = True
            tracked.saved.clear()

    def _move_back(self, tracked: Tracked) -> None:
        """Blocks behind what the request has now are computed again."""
        computed = tracked.request.num_computed_tokens
        for group in self.groups:
            end = computed // group.block_tokens
            if tracked.saved.get(group.number, 0) > end:
                tracked.saved[group.number] = end
                tracked.vetoed = True  # what failed once is not promised again

    def finished(self, request: Request) -> None:
        """The engine is done with it."""
        tracked = self.tracked.pop(request.request_id, None)
        if tracked is not None:
            self._let_go(tracked)
        self._pending = [load for load in self._pending if load.request_id != request.request_id]

    def _let_go(self, tracked: Tracked) -> None:
        if tracked.lookup is not None:
            self._messages.give_back(tracked.lookup.cancel())
        self._forget_answer(tracked)
        self._forget_load(tracked)

    def clear(self) -> bool:
        """Clear what engines of these namespaces have stored, on the tiers too; returns whether a server has done
        so."""
        try:
            for namespace in {each.id: each for rank in self.namespaces for each in rank}.values():
                self.client.clear(namespace, tiers=True)
        except CacheError as error:
            log.warning("the cache could not be cleared: %s", error)
            return False
        return True

    def close(self) -> None:
        """The engine ends."""
        for tracked in self.tracked.values():
            if tracked.lookup is not None:
                tracked.lookup.cancel()
        self._messages.close()
        self.client.close()

    def _tracked(self, request: Request) -> Tracked:
        tracked = self.tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            if tracked is not None:
                self._let_go(tracked)
            tracked = self.tracked[request.request_id] = Tracked(request)
        return tracked

    @property
    def requests(self) -> int:
        """How many requests it has."""
        return len(self.tracked)


def _trace_of(request: Request) -> str:
    """The trace that a request belongs to, as W3C Trace Context; empty: none. vLLM keeps the headers if it exports
    traces itself."""
    headers: Mapping[str, str] = getattr(request, "trace_headers", None) or {}
    return headers.get("traceparent", "")


def _computed_after(output: Any) -> dict[str, int]:
    """For each scheduled request, the tokens that have KV after the step. Drafts may be rejected, and do not count."""
    before = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    drafts = output.scheduled_spec_decode_tokens
    return {
        request_id: before[request_id] + count - len(drafts.get(request_id, ()))
        for request_id, count in output.num_scheduled_tokens.items()
        if request_id in before
    }
