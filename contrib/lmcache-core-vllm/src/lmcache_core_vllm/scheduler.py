"""The scheduler's side: which blocks a request need not compute, and which blocks each step has made.

In a step, all requests together wait for the server at most `step_wait_s`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol
from uuid import uuid4

from lmcache_core import Client, Promise
from lmcache_core.errors import CacheError, LimitError, UsageError
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm.chunks import ChunkOffers
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.counters import Counters
from lmcache_core_vllm.groups import Group, Kind, boundary_step
from lmcache_core_vllm.hints import HintSender
from lmcache_core_vllm.lookups import Bounds, Found, Lookup, Question
from lmcache_core_vllm.messages import Messages
from lmcache_core_vllm.namespaces import Hashing, RankFacts, introduce, namespaces_of
from lmcache_core_vllm.patience import Patience
from lmcache_core_vllm.planning import Describer
from lmcache_core_vllm.prefill import Transfer, answer_of, transfer_of
from lmcache_core_vllm.reports import Reports
from lmcache_core_vllm.request_params import CHUNK_REFUSED, REFUSED, RequestParams
from lmcache_core_vllm.steps import STEPS_AHEAD, Blocks, Load, Step
from lmcache_core_vllm.weights import Adapters, Weights

log = logging.getLogger("vllm.lmcache_core")

ANSWER_KEPT_S = 5.0  # after this, a request that found no room in the engine is looked up again
EARLY_LOOKUPS_MAX = 8  # of requests in the engine's queue: what is held for them fills a session's share of the pool


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
    kv_transfer_params: Mapping[str, Any] | None


class Tracked:
    """A request that the engine has."""

    def __init__(self, request: Request, adapter: str | None = "", transfer: Transfer | None = None) -> None:
        """`adapter`: the version of its LoRA adapter; None: nothing of it may be cached. `transfer`: another engine
        computes its prompt, or decodes."""
        self.request = request
        self.adapter = adapter
        self.params = RequestParams.of(request.kv_transfer_params)
        self.question: Question | None = None  # the last one
        self.lookup: Lookup | None = None
        self.found: Found | None = None
        self.loaded: Found | None = None  # what is being loaded
        self.computed = 0  # what the engine had when it got `found`
        self.transfer = transfer
        self.awaits = transfer is not None and not transfer.computes  # blocks that are still being computed
        self.vetoed = False  # a load for it has failed
        self.loading = False  # between steps
        self.matched_s: float | None = None  # since when it waits for an answer
        self.chunk_due = self.params.store_chunk  # once its prompt is computed
        self.chunk_refused = ""
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
        engine_id: str = "",
        chunks: ChunkOffers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hashing`: how block hashes are made, known with the first request. `waits`: loads are synchronous. `chunks`:
        what becomes of documents that are to be stored as chunks."""
        self._config = config
        self.groups = groups
        self.client = client
        self._hashing = hashing
        self._loads = loads
        self._saves = saves
        self._waits = waits
        self._engine_id = engine_id
        self._clock = clock
        self.namespaces: list[list[Namespace]] = []  # of each rank those of its groups
        self._shards: list[RankFacts] = []
        self._weights: Weights | None = None  # what the engine has loaded since its workers reported what they have
        self.tracked: dict[str, Tracked] = {}
        self._pending: list[Load] = []
        self._awaited: dict[str, Load] = {}  # by request: sent to the workers, not yet reported as ended
        self._load_number = 0
        self._messages = Messages(client)
        self._hints = HintSender(client, groups, clock)
        self._adapters = Adapters(config)
        self._describer = Describer(config.description)
        self._chunks = chunks or ChunkOffers("", {}, None)
        self._reports = Reports(client, self._messages, hashing, config.report_token_ids)
        # whose loads each step waits for; the last one is the next step
        self._step_loads: deque[list[Tracked]] = deque([[]])
        self._saved_states: list[int] = []  # blocks of states that the last step saves
        self._epoch = 0
        self._steps = 0  # made so far
        self._waited_s = 0.0  # in this step
        self._why_refused = ""
        self._patience = Patience(config.retry_s, clock)
        self._step_tokens = boundary_step(groups)
        self._early: set[str] = set()  # requests whose lookups have begun before their turn
        self.counters = Counters()

    def know_ranks(self, ranks: Iterable[RankFacts]) -> None:
        """The workers' facts; before they arrive nothing is looked up. They come again when the engine has woken, with
        the weights that it has then."""
        shards = {rank.shard: rank for rank in ranks}
        self._weights = None
        self._forget_found()
        self._shards = [shards[shard] for shard in sorted(shards)]
        self._bind()

    def weights_changed(self, weights: Weights) -> None:
        """The engine computes with these from its next step on. If requests go on over blocks of the former weights,
        vLLM has kept its own prefix cache too, and others would build on that: until the next reset the engine shares
        with nobody."""
        self._weights = weights
        if all(rank.computing_with(weights) == rank for rank in self._shards):
            return
        if self._forget_found():
            self._weights = replace(weights, version=f"{weights.version} mixed {uuid4().hex}")
        self._shards = [rank.computing_with(self._weights) for rank in self._shards]
        self._bind()

    def _forget_found(self) -> bool:
        """What was found for requests, or stored of them, was of other weights. Returns whether some go on over blocks
        of those; nothing of such a request is cached from now on."""
        goes_on = False
        for tracked in self.tracked.values():
            if tracked.request.num_computed_tokens or tracked.loading:
                tracked.adapter = None
                goes_on = True
            self._let_go(tracked)
            self._early.discard(tracked.request.request_id)
            tracked.lookup = tracked.question = None
            tracked.saved.clear()
        return goes_on

    def _bind(self) -> None:
        self.namespaces = [namespaces_of(rank, self._config.salt) for rank in self._shards]
        introduce(self.client, (each for namespaces in self.namespaces for each in namespaces))

    # --- before a request is scheduled ----------------------------------------------------------------------

    def queued(self, request: Request, computed: int) -> None:
        """The engine has got a request, of which it has `computed` tokens itself. What the index does not have is asked
        for now, so that tiers load it while the request waits for its turn."""
        tracked = self._tracked(request)
        self._describer.describe(self.groups, self.namespaces, self._hashing)
        self._pass_on_hints(tracked)
        if (
            tracked.awaits
            or not self._may_look_up(tracked)
            or self._patience.over
            or len(self._early) >= EARLY_LOOKUPS_MAX
        ):
            return
        start = computed - computed % self._step_tokens
        bounds = Bounds(start, self._limit(tracked, start), request.num_tokens)
        if bounds.limit > bounds.start and self._begin(tracked, bounds, early=True) is None:
            self._early.add(request.request_id)

    def _pass_on_hints(self, tracked: Tracked) -> None:
        request = tracked.request
        envelope = getattr(request, "kv_hints", None)
        if envelope is None:
            return
        cached = bool(self.namespaces) and tracked.adapter is not None and not tracked.params.refused
        hashing = self._hashing().of(tracked.adapter or "") if cached else None
        sent = self._hints.send(envelope, request.block_hashes, hashing, self.namespaces)
        self.counters.add("hints_sent" if sent else "hints_dropped")

    def _may_look_up(self, tracked: Tracked) -> bool:
        wanted = self._loads and not tracked.request.skip_reading_prefix_cache
        return wanted and bool(self.namespaces) and not tracked.vetoed and tracked.adapter is not None

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond the `computed` ones can be loaded, and whether between steps. None: ask again."""
        tracked = self._tracked(request)
        tracked.computed = computed
        self._early.discard(request.request_id)
        if not self._may_look_up(tracked):
            self.counters.add("lookup_vetoed", tracked.vetoed or tracked.adapter is None)
            return 0, False
        found = tracked.found
        if found is not None and not self._still_holds(found, tracked, computed):
            self._forget_answer(tracked)
            found = None
        if found is None:
            if tracked.matched_s is None:
                tracked.matched_s = self._clock()
            found = tracked.found = self._of_other_engine(tracked, computed) or self._ask(tracked, computed)
        if found is None:
            return None, False
        tokens = max(0, found.boundary - computed)
        if not tokens and found.promises:
            self._messages.give_back(found.numbers)
            tracked.found = found._replace(promises=())
        return tokens, bool(tokens) and not self._loads_in_step(tracked)

    def _loads_in_step(self, tracked: Tracked) -> bool:
        """Whether the step that needs its blocks waits for them."""
        return self._waits and not tracked.awaits

    def _of_other_engine(self, tracked: Tracked, computed: int) -> Found | None:
        """If another engine computes the prompt now: all of its blocks, as if they were there. The workers read them as
        they come, once the engine has room; what does not come in time is a load that failed."""
        request, transfer = tracked.request, tracked.transfer
        if not tracked.awaits or transfer is None:
            return None
        limit = self._limit(tracked, computed)
        if transfer.tokens is not None and transfer.tokens < limit:
            limit = transfer.tokens - transfer.tokens % self._step_tokens
        if limit > computed:
            had = self._question(tracked, Bounds(computed, limit, request.num_tokens)).by_index(
                self.client, self._clock()
            )
            if had.boundary < limit and self.client.published is not None and not self.client.why_unreachable:
                tracked.matched_s = None
                return had._replace(boundary=limit)
        tracked.awaits = False  # it is there, or may not be loaded, or nobody can store it
        return None

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
        request = tracked.request
        if tracked.lookup is None:
            bounds = Bounds(computed, self._limit(tracked, computed), request.num_tokens)
            if bounds.limit <= computed:
                return Found(computed, computed, request.num_tokens, self._clock())
            had = self._begin(tracked, bounds)
            if tracked.params.refused:
                return self._ask(tracked, computed)
            if had is not None:
                self._count(tracked, had, bounds.limit, asked=False)
                return had
        lookup = tracked.lookup
        assert lookup is not None
        try:
            found = self._answer_of(lookup)
        except (UsageError, LimitError) as error:
            self._note_refusal(tracked, error)
            if tracked.params.refused:
                tracked.lookup = None
                return self._ask(tracked, computed)
            found = lookup.by_index
        if found is not None:
            tracked.lookup = None
            if lookup.early and not self._still_holds(found, tracked, computed):
                self._messages.give_back(found.numbers)
                return self._ask(tracked, computed)
            self._count(tracked, found, lookup.question.bounds.limit, asked=lookup.handle.asked)
        return found

    def _note_refusal(self, tracked: Tracked, error: CacheError) -> None:
        """The server has no such tier as the request names, or no room, or refuses the namespace, until it is started
        with other settings. Only the first of these says anything about the request."""
        tiers = tracked.params.tiers or ()
        if isinstance(error, UsageError) and any(f"no tier is named {name!r}" in str(error) for name in tiers):
            self._refuse(tracked, RequestParams.refuse(f"kv_transfer_params: kv_load_tiers: {error}"))
            return
        if str(error) != self._why_refused:
            log.error("nothing of %s can be cached: %s", self.namespaces[0][0].model, error)
        self._why_refused = str(error)
        self._patience.waited_in_vain()

    def _refuse(self, tracked: Tracked, params: RequestParams) -> None:
        tracked.params = params
        self.counters.add("params_refused_requests")
        log.warning("request %s is computed without the cache: %s", tracked.request.request_id, params.refused)

    def _begin(self, tracked: Tracked, bounds: Bounds, *, early: bool = False) -> Found | None:
        """What the index has, if that is all, or the server cannot be asked, or refuses at once; else it is asked."""
        question = self._question(tracked, bounds)
        had = question.by_index(self.client, self._clock())
        tiers = tracked.params.tiers
        if had.boundary == bounds.limit or self._patience.over or tiers == ():
            return had
        try:
            handle = question.ask(self.client, self._config.lookup_timeout_s / 2, tiers)
        except (UsageError, LimitError) as error:  # the answer of a fast server is there already
            self._note_refusal(tracked, error)
            return had
        tracked.lookup = Lookup(question, had, self._clock(), handle, early)
        return None

    def _question(self, tracked: Tracked, bounds: Bounds) -> Question:
        request = tracked.request
        hashing, trace = self._hashing().of(tracked.adapter or ""), _trace_of(request)
        question = Question(self.groups, self.namespaces, hashing, request.block_hashes, bounds, trace)
        tracked.question = question
        return question

    def _answer_of(self, lookup: Lookup) -> Found | None:
        """The server's answer, if it comes within this step's wait; else what the index has."""
        if not lookup.handle.done and (left := self._config.step_wait_s - self._waited_s) > 0:
            began = self._clock()
            lookup.handle.wait(left)
            self._waited_s += self._clock() - began
        found = lookup.found(self._clock())
        if found is not None:
            self._patience.answered()
            return found
        if self._clock() - lookup.began_s <= self._config.lookup_timeout_s:
            return None
        lookup.handle.cancel()
        self._patience.waited_in_vain()
        self.counters.add("lookup_timeouts")
        return lookup.by_index

    def _limit(self, tracked: Tracked, start: int) -> int:
        """The last boundary that leaves a token to compute, whose blocks have hashes, and up to which the request may
        load what it does not have at `start`."""
        request = tracked.request
        hashed = min(group.hashed_blocks(request.block_hashes) * group.block_tokens for group in self.groups)
        limit = tracked.params.load_end(start, min(hashed, request.num_tokens - 1))
        return limit - limit % self._step_tokens

    def _count(self, tracked: Tracked, found: Found, limit: int, *, asked: bool) -> None:
        """In vLLM's figures, and in the server's, so that both are the same: what the engine itself has is in neither.
        `limit`: the last boundary that might have been found."""
        tokens, hit_tokens = max(0, limit - tracked.computed), max(0, found.boundary - tracked.computed)
        add = self.counters.add
        add("lookup_requests")
        add("lookup_hit_tokens", hit_tokens)
        add("lookup_missed_tokens", tokens - hit_tokens)
        add("lookup_unreachable", not found.reachable)
        add("lookup_held", bool(found.promises))
        assert tracked.question is not None
        tracked.question.count(self.client, tokens, hit_tokens, found.from_tiers, asked=asked)
        if tracked.matched_s is not None:
            self.counters.time("lookup_seconds", self._clock() - tracked.matched_s)
            tracked.matched_s = None

    def allocated(self, request: Request, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """The engine has made room: `external` tokens are to be loaded, into these blocks."""
        tracked = self._tracked(request)
        found = tracked.found
        if external <= 0:
            tracked.awaits = False  # from now on it is computed here
            return
        tracked.found = None
        start, boundary = tracked.computed, tracked.computed + external
        blocks = []
        for group in self.groups:
            end = boundary // group.block_tokens
            first = max(start // group.block_tokens, group.first_needed(boundary))
            ids = dict(enumerate(block_ids[group.number][first:end], first))
            if found is None:
                blocks.append(Blocks(group.number, [], list(ids.values())))
                continue
            blocks.append(self._blocks(tracked, group, ids, found.promises_of(group, first, end)))
            tracked.saved[group.number] = end
        in_step = self._loads_in_step(tracked)
        tracked.loading = not in_step
        self._forget_load(tracked)
        self._load_number += 1
        wait_s = tracked.transfer.wait_s if tracked.awaits and tracked.transfer is not None else 0.0
        load = Load(request.request_id, in_step, blocks, self._load_number, wait_s)
        if found is None:  # vLLM deferred the load, and the weights changed meanwhile: workers report it as lost
            self._awaited[request.request_id] = load
            return
        tracked.loaded = found
        if in_step:
            self._step_loads[-1].append(tracked)
        self._pending.append(load)

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
        idle = not output.total_num_scheduled_tokens
        made = Step(self._hashing(), self._epoch, self._steps, idle, weights=self._weights)
        made.awaited = list(self._awaited.values())
        made.loads, self._pending = self._pending, []
        self._awaited |= {load.request_id: load.without_hashes() for load in made.loads if not load.waits}
        self._give_back_ended()
        if self._saves and self.namespaces:
            made.fresh = self._fresh_blocks(output, made.loads)
            state = output.kv_connector_block_state
            for request_id, computed in _computed_after(output).items():
                tracked = self.tracked.get(request_id)
                table = None if state is None else state.get_block_ids(request_id)
                if tracked is not None and table is not None and tracked.adapter is not None:
                    self._add_saves(made, tracked, self._blocks_made(tracked, table, computed))
                    if tracked.chunk_due and computed >= tracked.request.num_prompt_tokens:
                        self._add_chunk(made, tracked, table[0])
            if state is not None:
                self._add_states(made, state.boundary_state_offloads)
        return made

    def _fresh_blocks(self, output: Any, loads: Sequence[Load]) -> list[int]:
        """Blocks that were given out since the step before, and those of states: vLLM writes to some of them again."""
        fresh, self._saved_states = self._saved_states, []
        for each in output.scheduled_new_reqs:
            for group, ids in zip(self.groups, each.block_ids, strict=True):
                fresh += ids[each.num_computed_tokens // group.block_tokens :]
        for new in output.scheduled_cached_reqs.new_block_ids:
            fresh += [block for ids in new or () for block in ids]
        return fresh + [block for load in loads for blocks in load.blocks for block in blocks.block_ids]

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
        computed = tracked.params.store_end(computed)
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
            ids = {at: block for at, block in enumerate(table[group.number][first:end], first) if block}
            if ids:  # blocks that have left the window are block 0
                made.append(self._blocks(tracked, group, ids))
        return made

    def _blocks(
        self, tracked: Tracked, group: Group, ids: Mapping[int, int], promises: Sequence[Promise] = ()
    ) -> Blocks:
        """Blocks of a request, by their numbers in it, to be loaded or saved; whoever routes requests is informed.
        `promises`: what holds those to be loaded."""
        request, adapter, namespace = tracked.request, tracked.adapter or "", self.namespaces[0][group.number]
        if not tracked.awaits:  # the engine that computes them reports them
            dropped = self._reports.tell(request, group, list(ids), namespace, adapter)
            self.counters.add("report_dropped_blocks", dropped)
        hashes = group.block_hashes(request.block_hashes, ids)
        return Blocks(group.number, hashes, list(ids.values()), list(promises), _trace_of(request), adapter)

    @staticmethod
    def _had(request: Request, group: Group) -> int:
        """Blocks that the engine had of a request before it first ran."""
        return request.num_computed_tokens // group.block_tokens

    @staticmethod
    def _add_saves(step: Step, tracked: Tracked, saves: Sequence[Blocks]) -> None:
        step.saves += saves
        step.delivers |= bool(saves) and tracked.transfer is not None and tracked.transfer.computes

    def _add_chunk(self, step: Step, tracked: Tracked, block_ids: Sequence[int]) -> None:
        tracked.chunk_due = False
        try:
            if tracked.params.store_end(tracked.request.num_prompt_tokens) < tracked.request.num_prompt_tokens:
                raise UsageError("max_offload_tokens keeps a part of the prompt out of the cache")
            step.chunks.append(self._chunks.offer(tracked.request, self.groups, self._shards, block_ids))
        except CacheError as error:
            tracked.chunk_refused = str(error)
            self.counters.add("save_dropped_chunks")

    def _add_states(self, step: Step, offers: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
        """States that end on a boundary: vLLM says which block holds each after this step."""
        for request_id, states in offers.items():
            tracked = self.tracked.get(request_id)
            for number, block_id, boundary in states:
                group = self.groups[number]
                if tracked is None or tracked.adapter is None or not block_id or boundary % group.block_tokens:
                    continue
                block = boundary // group.block_tokens - 1
                request = tracked.request
                if block < group.hashed_blocks(request.block_hashes) and self._wanted(tracked, boundary):
                    self._add_saves(step, tracked, [self._blocks(tracked, group, {block: block_id})])
                    self._saved_states.append(block_id)

    def _wanted(self, tracked: Tracked, boundary: int) -> bool:
        wanted = self._config.save_generated or boundary <= tracked.request.num_prompt_tokens
        return wanted and tracked.params.store_end(boundary) == boundary

    # --- after it -----------------------------------------------------------------------------------------------

    def heard(self, received: Iterable[str], failed: Iterable[str], invalid: Iterable[int]) -> None:
        """The workers' reports: loads that ended, those of them that failed, and blocks without valid KV. By then vLLM
        has moved the requests back, so everything after this is computed over sound blocks.
        """
        invalid = set(invalid)
        failed = set(failed)
        for request_id in received:
            self._awaited.pop(request_id, None)
            tracked = self.tracked.get(request_id)
            if tracked is not None:
                tracked.loading = False
                if tracked.awaits:
                    self._arrived(tracked, request_id in failed)
                    failed.discard(request_id)
                if invalid:
                    self._move_back(tracked)
                self._forget_load(tracked)
        for request_id in failed:
            self._veto(request_id)
        if invalid:
            self._epoch += 1
            for tracked in self.tracked.values():
                if not tracked.loading:
                    self._move_back(tracked)

    def _arrived(self, tracked: Tracked, none: bool) -> None:
        """What another engine has computed of a prompt has been read. `none`: vLLM has dropped all of it, and matches
        the request again, like any other. The same holds if nothing came."""
        tracked.awaits = False
        loaded, request = tracked.loaded, tracked.request
        kept = 0 if none else request.num_computed_tokens
        for group in self.groups:
            tracked.saved[group.number] = min(tracked.saved.get(group.number, 0), kept // group.block_tokens)
        if loaded is not None and kept:
            self._count(tracked, loaded._replace(boundary=min(kept, loaded.boundary)), loaded.boundary, asked=False)

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
        """Blocks behind what the request has now are computed again. Others than the one whose load has failed may only
        have been preempted."""
        computed = tracked.request.num_computed_tokens
        for group in self.groups:
            end = computed // group.block_tokens
            if tracked.saved.get(group.number, 0) > end:
                tracked.saved[group.number] = end
                tracked.vetoed |= tracked.loaded is not None  # what failed once is not promised again

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The engine is done with it. Returns what its answer has as `kv_transfer_params`: why those of the request
        were refused, or it was not stored as a chunk, and, if it was computed for another engine, what that one needs.
        """
        tracked = self.tracked.pop(request.request_id, None)
        self._early.discard(request.request_id)
        if tracked is not None:
            self._let_go(tracked)
        self._pending = [load for load in self._pending if load.request_id != request.request_id]
        if tracked is None:
            return None
        if tracked.params.refused:
            return {REFUSED: tracked.params.refused}
        if tracked.chunk_due:
            tracked.chunk_refused = "its prompt was not computed, or nothing of it may be cached"
        told = {CHUNK_REFUSED: tracked.chunk_refused} if tracked.chunk_refused else {}
        if tracked.transfer is not None and tracked.transfer.computes:
            told |= answer_of(tracked.transfer, request, self._engine_id, self._stored_tokens(tracked))
        return told or None

    def _stored_tokens(self, tracked: Tracked) -> int:
        """How many of the request's first tokens are stored, or have been offered."""
        ends = [
            tracked.saved.get(group.number, 0) * group.block_tokens
            for group in self.groups
            if group.kind is not Kind.STATE
        ]
        end = min(ends, default=0 if tracked.adapter is None else tracked.request.num_prompt_tokens)
        return tracked.params.store_end(end)

    def _let_go(self, tracked: Tracked) -> None:
        if tracked.lookup is not None:
            tracked.lookup.handle.cancel()
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
                tracked.lookup.handle.cancel()
        self._messages.close()
        self._hints.close()
        self.client.close()

    def _tracked(self, request: Request) -> Tracked:
        tracked = self.tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            if tracked is not None:
                self._let_go(tracked)
            adapter = self._adapters.version_of(request.lora_request)
            transfer = transfer_of(request, self._config)
            tracked = self.tracked[request.request_id] = Tracked(request, adapter, transfer)
            if tracked.params.refused:
                self._refuse(tracked, tracked.params)
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
