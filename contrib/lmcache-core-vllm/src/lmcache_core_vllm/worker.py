"""The workers' side: blocks between the engine's memory and the pool.

Loads that a step needs are waited for, layer by layer; all others run between steps, on threads of lmcache-core's
extension, and are polled once a step. When `save` returns, everything to be saved has been read from the engine's
memory, if that is the host's. On a device it is read behind what the engine has queued, by those threads; a step that
is given such blocks anew waits for the save first (`await_reads`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_core import Client, PageEntry, PageGroup, Promise, Status
from lmcache_core.client import Pages, PagesResult, RetrieveJob, StoreJob, threads_to_copy
from lmcache_core.cpu_share import CpuShare
from lmcache_core.errors import CacheError, PluginError, StaleRegionError
from lmcache_core.kernel.answers import Reason
from lmcache_core.plugins.suggest import install_command
from lmcache_core_vllm.arrivals import Arrivals
from lmcache_core_vllm.chunks import ChunkStores, Write
from lmcache_core_vllm.config import ConnectorConfig
from lmcache_core_vllm.counters import Counters
from lmcache_core_vllm.namespaces import Hashing, RankFacts, introduce, namespaces_of
from lmcache_core_vllm.patience import Allowance, Patience
from lmcache_core_vllm.pins import PoolPins
from lmcache_core_vllm.shards import Part
from lmcache_core_vllm.steps import STEPS_AHEAD, Blocks, Load, Step
from lmcache_core_vllm.tensors import LayerRegions
from lmcache_core_vllm.weights import Weights

if TYPE_CHECKING:
    from lmcache_copier import ServerPages, ServerRetrieve, ServerStore

log = logging.getLogger("vllm.lmcache_core")

Job = TypeVar("Job")

NULL_BLOCK = 0
BYTES_A_THREAD = 4 << 20  # the extension creates a thread for each this many bytes
CLOSE_S = 2.0  # for answers to the last saves
READ_WAIT_S = 5.0  # for the device, until the log says that it is waited for
SAVE_WAIT_S = 0.25  # an answer that takes this long now and then, as at a start, must not cost a prompt
SAVE_WAIT_SHARE = 0.01  # of the time, beyond which saves wait only `step_wait_s`
DELIVERY_WAIT_S = 0.25  # another engine waits for these blocks, and would wait much longer in vain


@dataclass
class _Loading:
    """A running load. `job` is None if it could not even begin."""

    load: Load
    job: RetrieveJob | ServerRetrieve | Arrivals | None
    began_s: float


@dataclass
class _Saving:
    job: StoreJob | ServerStore
    block_bytes: list[int]  # by entry
    reads: frozenset[int] = frozenset()  # blocks of a device that may not have been read yet


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
        more_shards: Sequence[Part] = (),
        ranks: int = 1,
        path: str = "",
        chunk_layers: Sequence[tuple[Any, Write]] = (),
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`memory`: of each group its layers' regions. `more_shards`: those that it holds beside `rank`; all of them
        are stored and loaded together. `ranks`: of the engine. `path`: where its weights came from.
        `chunk_layers`: as `ChunkStores` takes them. `cpu_clock`: processor seconds of the calling thread."""
        self._config = config
        self._client = client
        self.shards = [rank, *(each.facts for each in more_shards)]
        self._path = path
        self.memory = memory
        self._shard_memory = [memory, *(each.memory for each in more_shards)]
        self._clock = clock
        groups = [group for own in self._shard_memory for group in own]
        self._on_device = any(each.device == "cuda" for group in groups for layer in group for each in layer.regions)
        self._pins = PoolPins(client)
        self._bind()
        assert self._pages is not None
        layers = [layers for each in self._shard_memory for layers in each]
        self._regions = _regions_by_layer(self._pages.first_regions, layers)
        self.step_load: _Loading | None = None  # of all requests whose loads this step waits for
        self.loading: dict[str, _Loading] = {}
        self.saving: list[_Saving] = []
        self._arrived = Arrived()
        self._reported: dict[int, int] = {}  # by the number of a load, the step in which its end was reported
        self._alone = ranks == 1
        self._tainted_epoch = -1
        self._step_number = 0  # of the last step that began
        self._step_is_open = False
        self._unsound = False  # some step was not computed to its end
        self._knows_weights = True
        self._why_not_stored = ""
        self._save_waits = Allowance(SAVE_WAIT_S, SAVE_WAIT_SHARE, clock)
        self._patience = Patience(config.retry_s, clock)
        self._cpu_clock = cpu_clock
        self._share = CpuShare(config.store_cpu_share, clock)
        self.counters = Counters()
        self.chunks = ChunkStores(client, chunk_layers, self.counters)

    def _bind(self) -> None:
        """To the namespaces of what the rank computes with: of each shard those of its groups."""
        self.namespaces = [each for shard in self.shards for each in namespaces_of(shard, self._config.salt)]
        for number, each in enumerate(self.namespaces):
            line = "KV group %d is namespace %016x (%s), with %d bytes a block"
            log.info(line, number % len(self.memory), each.id, each.public_label, each.layout.nbytes)
        introduce(self._client, self.namespaces)
        self._pages: Pages | ServerPages | None = self._register()
        if self._on_device:
            self._pins.look()

    def _register(self) -> Pages | ServerPages:
        memory = [layers for each in self._shard_memory for layers in each]
        groups = [
            PageGroup(namespace, [each for layer in layers for each in layer.regions], 1, NULL_BLOCK)
            for namespace, layers in zip(self.namespaces, memory, strict=True)
        ]
        if self._config.transfer == "engine":
            return self._client.register_pages(groups)
        try:
            from lmcache_copier import register_pages
        except ImportError as error:
            why = f"transfer = {self._config.transfer!r} needs lmcache-copier in the engine's environment"
            raise PluginError(why, cure=install_command("lmcache-copier")) from error
        transfer: Any = self._config.transfer
        return register_pages(self._client, groups, transfer, say=log.info, patient=True)

    def _with_pages(self, call: Callable[[Pages | ServerPages], Job]) -> Job:
        """Memory that the engine has replaced without a word is registered anew, once."""
        if self._pages is None:
            raise StaleRegionError("the engine sleeps, and its KV cache has no memory")
        try:
            return call(self._pages)
        except StaleRegionError:
            self._pages = self._register()
            return call(self._pages)

    def unregister(self) -> None:
        """The engine gives its memory back, and sleeps. Loads that still write to it, and saves that still read it, end
        before this returns; the loads' requests are told of in the first step after it."""
        running = [*self.loading.values(), *([self.step_load] if self.step_load else [])]
        jobs = [each.job for each in running if each.job is not None]
        for job in jobs:
            job.cancel()
        for job in jobs:
            while not job.wait(self._config.load_timeout_s):
                log.warning("a load still writes to memory that vLLM takes back: it is waited for")
        for saving in self.saving:
            self._await_read(saving)
        if self._pages is not None and not isinstance(self._pages, Pages):
            self._pages.close()
        self._pages = None

    def restore(self, weights: Weights) -> None:
        """The engine has woken, with memory for its KV, and computes with these weights."""
        self.shards, self._path = [each.computing_with(weights) for each in self.shards], weights.path
        self._bind()

    @property
    def sleeps(self) -> bool:
        """Whether its memory is not registered."""
        return self._pages is None

    # --- steps --------------------------------------------------------------------------------------------------

    def begin_step(self, step: Step, path: str = "") -> None:
        """The engine is about to compute a step, with weights from this path. If the step before did not end, or did
        not even begin, it was interrupted: the scheduler treats its blocks as computed, and everything that builds on
        them. So nothing is stored from now on."""
        if self._step_is_open or step.number != self._step_number + 1:
            if not self._unsound:
                log.warning(
                    "a step of the engine was interrupted, or has failed: its blocks may hold anything, so nothing "
                    "more of this engine is stored until it is started anew"
                )
            self._unsound = True
            self.end_step_loads(step)
        self._step_number, self._step_is_open = step.number, True
        self._client.look()  # after a restart of the server, the link is there when this step's blocks are saved
        if self._on_device:
            self._pins.look()
        weights = step.weights
        shards = self.shards if weights is None else [each.computing_with(weights) for each in self.shards]
        known = self._path if step.weights is None else step.weights.path
        if path != known and self._knows_weights:
            log.warning("nothing is cached: the engine's weights are from %s now, and were from %s", path, known)
        self._knows_weights = path == known
        if shards != self.shards or not self._knows_weights:
            self._end_waits()
        if shards != self.shards:
            self.shards = shards
            self._bind()
        self._find_lost(step)

    def _end_waits(self) -> None:
        """What other engines go on to compute is of other weights than this one's."""
        for loading in self.loading.values():
            if isinstance(loading.job, Arrivals):
                loading.job.cancel()

    def _find_lost(self, step: Step) -> None:
        """Loads that the scheduler waits for, and that are not running: an interrupt came before they began, or before
        their end was reported. vLLM would keep their requests forever, so report them as failed. With several ranks
        vLLM counts the reports, and the scheduler waits for the slowest: no rank may report twice, or the blocks would
        count as loaded while another rank still writes to them."""
        for load in step.awaited:
            loading, reported = self.loading.get(load.request_id), self._reported.get(load.number)
            if loading is not None and loading.load.number == load.number:
                continue
            if reported is None or (self._alone and step.number - reported > STEPS_AHEAD):
                self.loading[load.request_id] = _Loading(load, None, self._clock())
        oldest = step.number - STEPS_AHEAD
        awaited = {load.number for load in step.awaited}
        self._reported = {number: at for number, at in self._reported.items() if at >= oldest or number in awaited}

    def end_step(self, step: Step) -> None:
        """The step has been computed: wait for the last of its loads, then read what it made."""
        self.end_step_loads(step)
        self.save(step)
        self._save_chunks(step)
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
        if not self._knows_weights:
            return _Loading(load, job, began_s)
        try:
            entries = self._entries(load.blocks, hashing)
            if load.prefill_wait_s:
                arrivals = Arrivals(
                    self._client, self.namespaces, entries, self._retrieve, load.prefill_wait_s, self._clock
                )
                return _Loading(load, arrivals, began_s)
            promises = [
                blocks.promises[shard.shard[0]] if blocks.promises else None
                for blocks, shard in product(load.blocks, self.shards)
            ]
            job = self._retrieve(entries, promises, order)
        except CacheError as error:
            log.warning("a load could not begin, and its blocks are computed: %s", error)
        return _Loading(load, job, began_s)

    def _retrieve(
        self, entries: Sequence[PageEntry], promises: Sequence[Promise | None] = (), order: Any = "object"
    ) -> RetrieveJob | ServerRetrieve:
        return self._with_pages(
            lambda pages: pages.retrieve_start(
                entries,
                promises=promises,
                order=order,
                deadline_s=self._config.load_timeout_s,
                verify=self._config.verify,
            )
        )

    def wait_layer(self, layer: str) -> None:
        """Wait until the blocks of this layer are there, if the step needs any; not longer than a load may take."""
        loading = self.step_load
        if loading is None or loading.job is None or isinstance(loading.job, Arrivals):
            return
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
        """For blocks that are there, if any are being read; else for those of another engine."""
        running = [job for each in self.loading.values() if (job := each.job) is not None and not job.done()]
        if running:
            min(running, key=lambda job: isinstance(job, Arrivals)).wait(self._config.step_wait_s)

    def _note_arrival(self, request_id: str, loading: _Loading) -> None:
        invalid = self.note_end(loading)
        self._arrived.received.add(request_id)
        self._reported[loading.load.number] = self._step_number
        if invalid:
            self._arrived.failed.add(request_id)
            if len(self.memory) == 1:  # with several groups vLLM wants requests only, not blocks
                self._arrived.invalid |= invalid

    def note_end(self, loading: _Loading) -> set[int]:
        """Count it, and return its blocks without valid KV."""
        result = None if loading.job is None else loading.job.result
        add = self.counters.add
        waits = loading.load.prefill_wait_s > 0
        seconds = self._clock() - loading.began_s
        if waits:
            add("prefill_loads")
            add("prefill_seconds", seconds)
        else:
            self.counters.time("load_seconds", seconds)
        invalid: set[int] = set()
        failed = 0
        for number, (blocks, shard) in enumerate(product(loading.load.blocks, self.shards)):
            for at, block_id in enumerate(blocks.block_ids):
                if result is not None and result.statuses[number][at] is Status.HIT:
                    add("load_blocks")
                    add("load_bytes", shard.groups[blocks.group].block_bytes)
                else:
                    invalid.add(block_id)
                    failed += 1
        add("prefill_late_blocks" if waits else "load_failed_blocks", failed)
        if result is not None and any(Status.ABORTED in each for each in result.statuses):
            add("load_cancelled_requests")
        elif waits and invalid:
            log.info("%d blocks of a prompt did not come from the other engine in time, and are computed", failed)
        elif invalid:
            add("load_failed_requests")
            log.warning("%s", _why(result, failed))
        return invalid

    # --- saves ------------------------------------------------------------------------------------------------

    def save(self, step: Step) -> None:
        """Read what the step has made from the engine's memory; it is stored in the background."""
        self.hear_saves()
        if not step.saves or not self.shards[0].stores:
            return
        count = sum(len(blocks.hashes) for blocks in step.saves) * len(self.shards)
        if not self._is_sound(step):
            self.counters.add("save_tainted_blocks", count)
            return
        if self._patience.over or len(self.saving) >= self._config.saves_in_flight:
            self._drop(count)
            return
        if self._share.rests and not step.delivers:
            self.counters.add("save_paced_blocks", count)
            return
        began_s = self._cpu_clock()
        try:
            self._store(step, count)
        finally:
            # What a device copies is charged when it has been read: this thread does not see it.
            threads = 1 if self._on_device else self._threads_that_copy(step)
            self._share.charge((self._cpu_clock() - began_s) * threads)

    def _is_sound(self, step: Step) -> bool:
        """Whether what the step has computed is what it should be."""
        return not self._unsound and self._knows_weights and step.epoch > self._tainted_epoch

    def _save_chunks(self, step: Step) -> None:
        """They were asked for one by one, so they do not count in the share of the processor that saves have."""
        if self._is_sound(step):
            self.chunks.save(step.chunks)
        else:
            self.counters.add("save_dropped_chunks", len(step.chunks))

    def _store(self, step: Step, count: int) -> None:
        wait_s = max(self._config.step_wait_s, self._save_waits.left_s)
        if step.delivers:
            wait_s = max(wait_s, DELIVERY_WAIT_S)
        try:
            entries = self._entries(step.saves, step.hashing)
            job = self._with_pages(lambda pages: pages.store_start(entries, deadline_s=wait_s))
        except CacheError as error:
            if str(error) != self._why_not_stored:  # once, and not in every step
                log.warning("%d blocks are not stored: %s", count, error)
            self._why_not_stored = str(error)
            self._drop(count)
            self._patience.waited_in_vain()
            return
        self._save_waits.spend(job.waited_s)
        entries_bytes = [shard.groups[each.group].block_bytes for each, shard in product(step.saves, self.shards)]
        reads = frozenset(block for each in step.saves for block in each.block_ids) if self._on_device else frozenset()
        self.saving.append(_Saving(job, entries_bytes, reads))
        self.hear_saves()

    def await_reads(self, step: Step) -> None:
        """The engine is about to write to the blocks that this step is given: saves that still read one end first."""
        fresh = frozenset(step.fresh)
        for saving in self.saving:
            if not saving.reads.isdisjoint(fresh):
                self._await_read(saving)

    @staticmethod
    def _await_read(saving: _Saving) -> None:
        while not saving.job.wait_read(READ_WAIT_S):
            log.warning("a save still reads blocks that vLLM needs: it is waited for")

    def _threads_that_copy(self, step: Step) -> int:
        """This thread, and those that are created for a large copy: they take as long. Those of a copier are not this
        process's."""
        if not isinstance(self._pages, Pages):
            return 1
        pairs = product(step.saves, self.shards)
        nbytes = sum(len(blocks.hashes) * shard.groups[blocks.group].block_bytes for blocks, shard in pairs)
        return max(1, min(threads_to_copy(self._config.copy_threads), nbytes // BYTES_A_THREAD))

    def hear_saves(self) -> None:
        """Count the saves that the server has answered, and charge those that a device has copied."""
        open_saves = []
        for saving in self.saving:
            result = saving.job.result
            if saving.reads and saving.job.has_read:
                saving.reads = frozenset()
                self._share.charge(saving.job.device_s)
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
        self._drop(sum(statuses.count(Status.UNREACHABLE) for statuses in result.statuses))
        for number, statuses in enumerate(result.statuses):
            for status in statuses:
                if status is Status.STORED:
                    add("save_blocks")
                    add("save_bytes", saving.block_bytes[number])
                elif status is Status.EXISTS:
                    add("save_existing_blocks")
                elif status is not Status.UNREACHABLE:
                    add("save_refused_blocks")

    def _drop(self, count: int) -> None:
        """These are not stored. Only the worker knows: the server may never have heard of them."""
        self.counters.add("save_dropped_blocks", count)
        self._client.count_dropped_stores(count)

    # --- both -------------------------------------------------------------------------------------------------

    def _entries(self, chosen: Sequence[Blocks], hashing: Hashing) -> list[PageEntry]:
        """Of each of these blocks one for each shard, in order."""
        firsts = range(0, len(self.namespaces), len(self.memory))
        return [blocks.entry(hashing, self.namespaces, first) for blocks, first in product(chosen, firsts)]

    def close(self) -> None:
        """Stop all access to the engine's memory. Waits a little for answers to the last saves."""
        for loading in [*self.loading.values(), *([self.step_load] if self.step_load else [])]:
            if loading.job is not None:
                loading.job.cancel()
        until = self._clock() + CLOSE_S
        for saving in self.saving:
            if not saving.job.wait(max(0.0, until - self._clock())) and not saving.job.has_read:
                saving.job.cancel()
        self.chunks.close()
        self._client.close()


def _regions_by_layer(first_regions: Sequence[int], memory: Sequence[Sequence[LayerRegions]]) -> dict[str, list[int]]:
    """The numbers of each layer's regions, as jobs count them."""
    found: dict[str, list[int]] = {}
    for first, layers in zip(first_regions, memory, strict=True):
        for layer in layers:
            found.setdefault(layer.layer, []).extend(range(first, first + len(layer.regions)))
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
