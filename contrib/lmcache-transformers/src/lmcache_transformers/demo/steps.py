"""The steps of the demo, in order, and what must hold after each."""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import threading
import time
from argparse import Namespace as Arguments
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmcache_core import Status
from lmcache_core.errors import CacheError, DisconnectedError
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens import Namespace
from lmcache_transformers import smollm2
from lmcache_transformers.demo.job import Job
from lmcache_transformers.demo.model import QUESTIONS, ModelShape, write_document, write_page
from lmcache_transformers.demo.observe import look
from lmcache_transformers.demo.processes import HangingWorker, run_worker
from lmcache_transformers.demo.report import Report, Row
from lmcache_transformers.demo.server import DemoError, ServerProcess, wait_for

SETTLE_TIMEOUT_S = 60.0  # a safety net for things that take milliseconds: noticing a death, emptying a queue
TIER_WAIT_S = 60.0  # how long a worker may wait for the disk; a slow one is slow, not wrong
POOL_BYTES_MIN = 256 << 20


class Demo:
    """One run. Each step is a method that adds to the report."""

    def __init__(self, arguments: Arguments, folder: Path, report: Report) -> None:
        self.folder = folder
        self.report = report
        shape = ModelShape(arguments.layers, arguments.kv_heads, arguments.seed)
        tokens = arguments.tokens
        if arguments.model == "smollm2":
            document = write_page(folder, arguments.document)
            tokens = min(tokens, document.stat().st_size // 2)  # of text, a token is four bytes
        else:
            document = write_document(folder, tokens, arguments.document)
        # Room for the document, for the one whose writer is killed, and for as much again.
        pool_bytes = max(POOL_BYTES_MIN, 4 * tokens * shape.token_bytes)
        self.server = ServerProcess(folder, pool_bytes, arguments.backing, arguments.chunk_tokens)
        self.job = Job(
            task="",
            model=arguments.model,
            folder=arguments.folder,
            question=0,
            document=str(document),
            tokens=arguments.tokens,
            chunk_tokens=arguments.chunk_tokens,
            answer_tokens=arguments.answer_tokens,
            layers=arguments.layers,
            kv_heads=arguments.kv_heads,
            seed=arguments.seed,
            server=self.server.name,
            runtime_dir=str(self.server.runtime_dir),
            wait_s=TIER_WAIT_S,
        )
        self.uncached: list[dict[str, Any]] = []

    def run(self) -> None:
        """All steps. Raises `DemoError` if one could not be done at all."""
        report = self.report
        with ExitStack() as stack:
            stack.enter_context(self.server)
            report.step("starting a server with a pool and a disk tier")
            report.facts["server_ready_s"] = self.server.start()
            self.client = stack.enter_context(self.server.observer())
            for question in (0, 1):
                report.step(f"question {question + 1} without a cache, to compare with")
                self.uncached.append(self._work("uncached", question))
            if not self.chunks_expected:
                raise DemoError("the document is shorter than one chunk: give more --tokens, or fewer --chunk-tokens")
            self._first_question()
            self._reuse(2, "another question", "pool")
            self._empty_the_pool()
            self._reuse(3, "after the pool was emptied", "disk")
            report.step("kill -9 of the server, and a new one")
            self.server.kill()
            report.facts["server_restarted_s"] = self.server.start()
            wait_for("our client to find the new server", self._connected, SETTLE_TIMEOUT_S)
            self._reuse(4, "after kill -9 of the server", "disk")
            self._killed_writer()
            report.step("stopping the server")
            report.check("the server ends cleanly on SIGTERM", self.server.stop() == 0)
        report.finish()

    @property
    def chunks_expected(self) -> int:
        """How many chunks the prompts of both questions begin with."""
        shared: int = self.uncached[0]["tokens_shared"]
        return shared // self.job.chunk_tokens

    def _connected(self) -> bool | None:
        try:
            self.client.noop()
        except DisconnectedError:
            return None  # it noticed the loss just now; its next call connects again
        return True

    def _work(self, task: str, question: int) -> dict[str, Any]:
        return run_worker(replace(self.job, task=task, question=question), self.folder)

    def _first_question(self) -> None:
        self.report.step("1: a long document with a question, computed and stored")
        result = self._work("generate", 0)
        self.report.row(
            Row(
                step=1,
                run="first question",
                source="computed",
                tokens_prompt=result["tokens_prompt"],
                tokens_reused=result["tokens_reused"],
                cold_s=result["first_token_s"],
                warm_s=None,
                moved="stored",
                bytes_moved=result["stored_bytes"],
                move_s=result["store_s"],
                equal=result["answer"] == self.uncached[0]["answer"],
                question=QUESTIONS[0],
                answer=result["text"],
            )
        )
        self.report.check("1: nothing was cached before", result["tokens_reused"] == 0)
        needed = self.chunks_expected * self.job.chunk_tokens * self.job.shape.token_bytes
        self.report.check("1: every whole chunk of the document was stored", result["stored_bytes"] >= needed)

    def _reuse(self, step: int, run: str, source: str) -> None:
        """Ask question 2 in a new process: the prefix comes from `source`, and the answer must not show it."""
        self.report.step(f"{step}: {run}, prefix from the {source}")
        before = look(self.client).disk_loads
        result = self._work("generate", 1)
        loaded = look(self.client).disk_loads - before
        cold = self.uncached[1]
        self.report.row(
            Row(
                step=step,
                run=run,
                source=source,
                tokens_prompt=result["tokens_prompt"],
                tokens_reused=result["tokens_reused"],
                cold_s=cold["first_token_s"],
                warm_s=result["first_token_s"],
                moved="retrieved",
                bytes_moved=result["loaded_bytes"],
                move_s=result["load_s"],
                equal=result["answer"] == cold["answer"],
                question=QUESTIONS[1],
                answer=result["text"],
            )
        )
        check = self.report.check
        check(
            f"{step}: the whole document was reused",
            result["tokens_reused"] >= self.chunks_expected * self.job.chunk_tokens,
        )
        check(f"{step}: with zeroed KV the answer differs", result["answer_zeroed"] != cold["answer"])
        chunks = self.chunks_expected
        if source == "disk":
            check(f"{step}: every chunk came from the disk tier", loaded >= chunks, f"{loaded} of {chunks}")
        else:
            check(f"{step}: no chunk came from the disk tier", loaded == 0, f"{loaded} loaded")

    def _empty_the_pool(self) -> None:
        self.report.step("emptying the pool, once everything is on disk")
        chunks = self.chunks_expected
        wait_for(
            f"{chunks} chunks to be on disk",
            lambda: look(self.client).disk_objects >= chunks or None,
            SETTLE_TIMEOUT_S,
        )
        self._clear_and_wait()

    def _clear_and_wait(self) -> None:
        self.client.clear()
        wait_for("the pool to be empty", lambda: look(self.client).used_bytes == 0 or None, SETTLE_TIMEOUT_S)

    def _killed_writer(self) -> None:
        report, client = self.report, self.client
        report.step("5: kill -9 of a worker between prepare and commit")
        self._clear_and_wait()
        with HangingWorker(replace(self.job, task="hang"), self.folder) as worker:
            written = worker.written
            held = look(client).writing_bytes
            killed_s = time.perf_counter()
            worker.kill()
            wait_for(
                "the memory of the killed worker to be free",
                lambda: look(client).used_bytes == 0 or None,
                SETTLE_TIMEOUT_S,
            )
            report.facts["killed_writer_freed_s"] = time.perf_counter() - killed_s
        namespace = Namespace(written["model"], Layout.from_text(written["layout"]), format=written["format"])
        keys = [bytes.fromhex(key) for key in written["keys"]]
        found = client.lookup(keys, namespace=namespace, prefix=False, wait_s=TIER_WAIT_S)
        report.row(
            Row(
                step=5,
                run="kill -9 of a writer",
                source="nowhere",
                tokens_prompt=len(keys) * self.job.chunk_tokens,
                tokens_reused=found.hits * self.job.chunk_tokens,
                cold_s=None,
                warm_s=None,
                moved="discarded",
                bytes_moved=held,
                move_s=None,
                equal=None,
            )
        )
        report.check(
            "5: the worker held memory when it was killed, all of it free now",
            held == written["bytes_held"] > 0,
            f"{held / 1e6:.0f} MB",
        )
        report.check("5: its keys are misses", set(found.statuses) == {Status.MISS}, f"{len(keys)} keys")
        # The same question about committed chunks: otherwise we would only show that nothing is ever found.
        document = [bytes.fromhex(key) for key in written["prompt_keys"]]
        there = client.lookup(document, namespace=namespace, wait_s=TIER_WAIT_S)
        report.check("5: the document is still there", there.hits == len(document), f"{there.hits} keys")


def demonstrate(arguments: Arguments) -> int:
    """Run the demo and print what was found. Returns 0 only if all of it held."""
    if threading.current_thread() is threading.main_thread():
        # As for Ctrl-C: unwind, so that no process is left behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = Report(as_json=arguments.json, model=arguments.model)
    with ExitStack() as stack:
        stack.enter_context(_without_news("lmcache_core.client"))
        try:
            arguments.folder = _model(arguments) if arguments.model == "smollm2" else ""
            Demo(arguments, _folder(arguments.keep, stack), report).run()
        except CacheError as error:
            report.fail(str(error))
    report.print()
    return 0 if report.ok else 1


@contextmanager
def _without_news(name: str) -> Iterator[None]:
    """The demo kills its server: that nobody answers meanwhile is as it should be."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _model(arguments: Arguments) -> str:
    """The trained model's folder; its shape becomes the demo's."""
    if not arguments.json:
        sys.stderr.write(f"demo: {smollm2.NAME}; the first time it is downloaded (93 MB) and converted\n")
    arguments.layers, arguments.kv_heads = smollm2.LAYERS, smollm2.KV_HEADS
    return str(smollm2.folder())


def _folder(keep: str, stack: ExitStack) -> Path:
    if not keep:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-demo-")))
    folder = Path(keep).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise DemoError(f"{folder} is not empty, and what an earlier run left there would be found again: empty it")
    return folder
