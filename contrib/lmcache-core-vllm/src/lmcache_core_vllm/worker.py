"""The workers' side: blocks between the engine's memory and the pool.

Loads that a step needs are waited for, layer by layer; all others run between steps, on threads of lmcache-core's
extension, and are polled once a step. When `save` returns, everything to be saved has been read from the engine's
memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmcache_core.client.client import Client
from lmcache_core.client.copying import threads_to_copy
from lmcache_core.client.page_jobs import PagesResult, RetrieveJob, StoreJob
from lmcache_core.client.pages import PageEntry, Pages
from lmcache_core.client.regions import PageGroup
from lmcache_core.client.results import Status
from lmcache_core.cpu_share import CpuShare
from lmcache_core.errors import CacheError, StaleRegionError
from lmcache_core.kernel.answers import Reason
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.counters import Counters
from lmcache_core_vllm.namespaces import Hashing, RankFacts, introduce, namespaces_of
from lmcache_core_vllm.patience import Patience
from lmcache_core_vllm.steps import STEPS_AHEAD, Blocks, Load, Step
from lmcache_core_vllm.tensors import LayerRegions

log = logging.getLogger("vllm.lmcache_core")

Job = TypeVar("Job", RetrieveJob, StoreJob)

NULL_BLOCK = 0
BYTES_A_THREAD = 4 << 20  # the extension creates a thread for each this many bytes
CLOSE_S = 2.0  # for answers to the last saves


@dataclass
class _Loading:
    """A running load. `job` is None if it could not even begin."""

    load: Load
    job: RetrieveJob | None
    began_s: float


@dataclass
class _Saving:
    job: StoreJob
    block_bytes: list[int]  # by entry


@dataclass
class Arrived:
    """Loads that have ended since the last call: all, those that failed, and the blocks without valid KV."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


class WorkerSide:
    """One rank's memory, and its loads and saves in progress."""

    def __init__(
        self,
        config: ConnectorConfig,
        client: Client,
        rank: RankFacts,
        memory: Sequence[Sequence[LayerRegions]],
        *,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`memory`: of each group its layers' regions. `ranks`: of the engine. `cpu_clock`: processor seconds of the
        calling thread."""
        self._config = config
        self._client = client
        self._rank = rank
        self.memory = memory
        self._clock = clock
        self.namespaces = namespaces_of(rank, config.salt)
        for number, each in enumerate(self.namespaces):
            log.info("KV group %d is namespace %016x, with %d bytes a block", number, each.id, each.layout.nbytes)
        introduce(client, self.namespaces)
        self._pages = self._register()
        self._regions = _regions_by_layer(self._pages.first_regions, memory)
        self.step_load: _Loading | None = None  # of all requests whose loads this step waits for
        self.loading: dict[str, _Loading] = {}
        self.saving: list[_Saving] = []
        self._arrived = Arrived()
        self._told: dict[int, int] = {}  # by the number of a load, the step in which its end was reported
        self._alone = ranks == 1
        self._tainted_epoch = -1
        self._step_number = 0  # of the last step that began
        self._step_is_open = False
        self._unsound = False  # some step was not computed to its end
        self._patience = Patience(config.retry_s, clock)
        self._cpu_clock = cpu_clock
        self._share = CpuShare(config.store_cpu_share, clock)
        self.counters = Counters()

    def _register(self) -> Pages:
        return self._client.register_pages(
            [
                PageGroup(namespace, [each for layer in layers for each in layer.regions], 1, NULL_BLOCK)
                for namespace, layers in zip(self.namespaces, self.memory, strict=True)
            ]
        )

    def _with_pages(self, call: Callable[[Pages], Job]) -> Job:
        """After the engine has slept its memory is another one: registered anew, once."""
        try:
            return call(self._pages)
        except StaleRegionError:
            self._pages = self._register()
            return call(self._pages)

    # --- steps --------------------------------------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """The engine is about to compute a step. If the one before did not end, or did not even begin, it was
        interrupted: the scheduler treats its blocks as computed, and everything that builds on them. So nothing is
        stored from now on."""
        if self._step_is_open or step.number != self._step_number + 1:
            if not self._unsound:
                log.warning(
                    "a step of the engine was interrupted, or has failed: its blocks may hold anything, so nothing "
                    "more of this engine is stored until it is started anew"
                )
            self._unsound = True
            self.end_step_loads(step)
        self._step_number, self._step_is_open = step.number, True
        self._find_lost(step)

    def _find_lost(self, step: Step) -> None:
        """Loads that the scheduler waits for, and that are not running: an interrupt came before they began, or before
        their end was reported. vLLM would keep their requests forever, so report them as failed. With several ranks
        vLLM counts the reports, and the scheduler waits for the slowest: no rank may report twice, or the blocks would
        count as loaded while another rank still writes to them."""
        for load in step.awaited:
            loading, told = self.loading.get(load.request_id), self._told.get(load.number)
            if loading is not None and loading.load.number == load.number:
                continue
            if told is None or (self._alone and step.number - told > STEPS_AHEAD):
                self.loading[load.request_id] = _Loading(load, None, self._clock())
        oldest = step.number - STEPS_AHEAD
        awaited = {load.number for load in step.awaited}
        self._told = {number: at for number, at in self._told.items() if at >= oldest or number in awaited}

    def end_step(self, step: Step) -> None:
        """The step has been computed: wait for the last of its loads, then read what it made."""
        self.end_step_loads(step)
        self.save(step)
        self._step_is_open = False

    # --- loads --------------------------------------------------------------------------------------------------

    def start_loads(self, step: Step) -> None:
        """Begin what the step asks for, without waiting."""
        waited = [load for load in step.loads if load.waits]
        if waited:
            merged = Load("", True, [blocks for load in waited for blocks in load.blocks])
            self.step_load = self._begin(merged, step.hashing, "region")
        for load in step.loads:
            if not load.waits:
                self.loading[load.request_id] = self._begin(load, step.hashing, "object")

    def _begin(self, load: Load, hashing: Hashing, order: Any) -> _Loading:
        began_s, job = self._clock(), None
        try:
            entries = self._entries(load.blocks, hashing)
            promises = [each.promises[self._rank.shard[0]] if each.promises else None for each in load.blocks]
            job = self._with_pages(
                lambda pages: pages.retrieve_start(
                    entries,
                    promises=promises,
                    order=order,
                    deadline_s=self._config.load_timeout_s,
                    verify=self._config.verify,
                )
            )
        except CacheError as error:
            log.warning("a load could not begin, and its blocks are computed: %s", error)
        return _Loading(load, job, began_s)

    def wait_layer(self, layer: str) -> None:
        """Wait until the blocks of this layer are there, if the step needs any; not longer than a load may take."""
        loading = self.step_load
        if loading is not None and loading.job is not None:
            for region in self._regions.get(layer, ()):
                loading.job.wait_region(region, self._left(loading))

    def _left(self, loading: _Loading) -> float:
        return max(0.0, loading.began_s + self._config.load_timeout_s - self._clock())

    def end_step_loads(self, step: Step) -> None:
        """Wait for all loads of this step. If one has failed, nothing that the step computed is stored."""
        loading, self.step_load = self.step_load, None
        if loading is None:
            return
        if loading.job is not None and not loading.job.wait(self._left(loading)):
            loading.job.cancel()
        invalid = self.note_end(loading)
        if invalid:
            self._arrived.invalid |= invalid
            self._tainted_epoch = step.epoch

    def arrived(self, finished: Iterable[str], idle: bool) -> Arrived:
        """The loads that have ended by now; each is reported once. `finished`: requests that the engine has dropped.
        `idle`: nothing is computed, so a wait of some milliseconds delays nobody, and lends this thread to the copies.
        """
        for request_id in finished:
            loading = self.loading.get(request_id)
            if loading is not None and loading.job is not None:
                loading.job.cancel()
        if idle:
            self._wait_a_little()
        for request_id, loading in list(self.loading.items()):
            if loading.job is None or loading.job.done():
                del self.loading[request_id]
                self._note_arrival(request_id, loading)
        arrived, self._arrived = self._arrived, Arrived()
        return arrived

    def _wait_a_little(self) -> None:
        for loading in self.loading.values():
            if loading.job is not None and not loading.job.done():
                loading.job.wait(self._config.step_wait_s)
                return

    def _note_arrival(self, request_id: str, loading: _Loading) -> None:
        invalid = self.note_end(loading)
        self._arrived.received.add(request_id)
        self._told[loading.load.number] = self._step_number
        if invalid:
            self._arrived.failed.add(request_id)
            if len(self.memory) == 1:  # with several groups vLLM wants requests only, not blocks
                self._arrived.invalid |= invalid

    def note_end(self, loading: _Loading) -> set[int]:
        """Count it, and return its blocks without valid KV."""
        result = None if loading.job is None else loading.job.result
        add = self.counters.add
        add("load_seconds", self._clock() - loading.began_s)
        invalid: set[int] = set()
        failed = 0
        for number, blocks in enumerate(loading.load.blocks):
            for at, block_id in enumerate(blocks.block_ids):
                if result is not None and result.statuses[number][at] is Status.HIT:
                    add("load_blocks")
                    add("load_bytes", self._rank.groups[blocks.group].block_bytes)
                else:
                    invalid.add(block_id)
                    failed += 1
        add("load_failed_blocks", failed)
        if result is not None and any(Status.ABORTED in each for each in result.statuses):
            add("load_cancelled_requests")
        elif invalid:
            add("load_failed_requests")
            log.warning("%s", _why(result, failed))
        return invalid

    # --- saves ------------------------------------------------------------------------------------------------

    def save(self, step: Step) -> None:
        """Read what the step has made from the engine's memory; it is stored in the background."""
        self.hear_saves()
        if not step.saves or not self._rank.stores:
            return
        count = sum(len(blocks.hashes) for blocks in step.saves)
        if self._unsound or step.epoch <= self._tainted_epoch:
            self.counters.add("save_tainted_blocks", count)
            return
        if self._patience.over or len(self.saving) >= self._config.saves_in_flight:
            self.counters.add("save_dropped_blocks", count)
            return
        if self._share.rests:
            self.counters.add("save_paced_blocks", count)
            return
        began_s = self._cpu_clock()
        try:
            self._store(step, count)
        finally:
            self._share.charge((self._cpu_clock() - began_s) * self._threads_that_copy(step))

    def _store(self, step: Step, count: int) -> None:
        try:
            entries = self._entries(step.saves, step.hashing)
            job = self._with_pages(lambda pages: pages.store_start(entries, deadline_s=self._config.step_wait_s))
        except CacheError as error:
            log.warning("%d blocks are not stored: %s", count, error)
            self.counters.add("save_dropped_blocks", count)
            self._patience.waited_in_vain()
            return
        self.saving.append(_Saving(job, [self._rank.groups[each.group].block_bytes for each in step.saves]))
        self.hear_saves()

    def _threads_that_copy(self, step: Step) -> int:
        """This thread, and those that are created for a large copy: they take as long."""
        block_bytes = [group.block_bytes for group in self._rank.groups]
        nbytes = sum(len(blocks.hashes) * block_bytes[blocks.group] for blocks in step.saves)
        return max(1, min(threads_to_copy(self._config.copy_threads), nbytes // BYTES_A_THREAD))

    def hear_saves(self) -> None:
        """Count the saves that the server has answered."""
        open_saves = []
        for saving in self.saving:
            result = saving.job.result
            if result is None:
                open_saves.append(saving)
            else:
                self._count_saved(saving, result)
        self.saving = open_saves

    def _count_saved(self, saving: _Saving, result: PagesResult) -> None:
        add = self.counters.add
        if any(Reason.LATE in each for each in result.reasons):
            self._patience.waited_in_vain()
        else:
            self._patience.answered()
        for number, statuses in enumerate(result.statuses):
            for status in statuses:
                if status is Status.STORED:
                    add("save_blocks")
                    add("save_bytes", saving.block_bytes[number])
                elif status is Status.EXISTS:
                    add("save_existing_blocks")
                elif status is Status.UNREACHABLE:
                    add("save_dropped_blocks")
                else:
                    add("save_refused_blocks")

    # --- both -------------------------------------------------------------------------------------------------

    def _entries(self, chosen: Sequence[Blocks], hashing: Hashing) -> list[PageEntry]:
        return [
            PageEntry(
                blocks.group,
                hashing.keys(blocks.hashes, self.namespaces[blocks.group]),
                blocks.block_ids,
                traceparent=blocks.traceparent,
            )
            for blocks in chosen
        ]

    def close(self) -> None:
        """Stop all access to the engine's memory. Waits a little for answers to the last saves."""
        for loading in [*self.loading.values(), *([self.step_load] if self.step_load else [])]:
            if loading.job is not None:
                loading.job.cancel()
        until = self._clock() + CLOSE_S
        for saving in self.saving:
            saving.job.wait(max(0.0, until - self._clock()))
        self._client.close()


def _regions_by_layer(first_regions: Sequence[int], memory: Sequence[Sequence[LayerRegions]]) -> dict[str, range]:
    """The numbers of each layer's regions, as jobs count them."""
    found = {}
    for first, layers in zip(first_regions, memory, strict=True):
        for layer in layers:
            found[layer.layer] = range(first, first + len(layer.regions))
            first += len(layer.regions)
    return found


def _why(result: PagesResult | None, blocks: int) -> str:
    if result is None:
        return f"{blocks} blocks could not be read, and are computed"
    reasons = {
        f"{status} ({reason.name.lower()})" if reason else str(status)
        for statuses, whys in zip(result.statuses, result.reasons, strict=True)
        for status, reason in zip(statuses, whys, strict=True)
        if status is not Status.HIT
    }
    return f"{blocks} blocks could not be read, and are computed: {', '.join(sorted(reasons))}"
