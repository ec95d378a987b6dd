"""`lmcache-core trace`: make, inspect, convert and replay recordings of requests to a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.cli import connecting
from lmcache_core.cli.lazy import CommandParser
from lmcache_core.cli.table import print_table
from lmcache_core.errors import printable

if TYPE_CHECKING:
    from lmcache_lab.recorder import Operation
    from lmcache_lab.replaying import ReplayResult

REQUEST_BYTES = 4096  # size of an object, if the trace does not say
_PERCENTILES = (50, 99)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options, and one subcommand for each action."""
    shared = CommandParser(add_help=False)
    connecting.add_options(shared)
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", dest="action", required=True, parser_class=CommandParser
    )

    def add(name: str, summary: str, *, asks: bool = False) -> argparse.ArgumentParser:
        parents = [shared] if asks else []
        return actions.add_parser(name, parents=parents, help=summary, description=f"{name}: {summary}")

    start = add("start", "record a running server into a directory; meanwhile every hit costs a call", asks=True)
    start.add_argument("directory", metavar="DIR", type=Path)
    add("stop", "stop the recording of a running server", asks=True)
    info = add("info", "summarize a recording or a trace of requests")
    info.add_argument("trace", metavar="TRACE", type=Path, help="a recording's directory or file, or JSON lines")
    info.add_argument("--json", action="store_true", help="print JSON")
    convert = add("convert", "convert a recording or JSON lines to JSON lines for simulate and other tools")
    convert.add_argument("trace", metavar="TRACE", type=Path, help="a recording's directory or file, or JSON lines")
    convert.add_argument(
        "--format",
        choices=["hash_ids", "lookup_hash"],
        default="hash_ids",
        help="the format of the public Mooncake traces, or of LMCache's lookup logs (default: hash_ids)",
    )
    convert.add_argument("output", metavar="OUTPUT", type=Path, help="the file to write; - for standard output")
    replay = add("replay", "replay a trace against a running server", asks=True)
    replay.add_argument("trace", metavar="TRACE", type=Path)
    replay.add_argument(
        "--speed",
        type=_speed,
        default=1.0,
        help="1 to 100 times the recorded speed; max: no pauses",
    )
    replay.add_argument("--workers", type=int, metavar="N", help="number of clients, for JSON lines (default: 1)")
    replay.add_argument(
        "--object-bytes", type=int, metavar="N", help="size of each object, instead of the recorded size"
    )
    replay.add_argument("--json", action="store_true", help="print JSON")


def _speed(text: str) -> float:
    if text == "max":
        return 0.0
    try:
        speed = float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 1 <= speed <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed: give 1 to 100, or max")
    return speed


def run(arguments: argparse.Namespace) -> int:
    """Run the action; returns 0. Raises `UsageError` for a file that is not a trace, and the error that the server
    answers."""
    if arguments.action == "start":
        _start(arguments)
    elif arguments.action == "stop":
        _stop(arguments)
    elif arguments.action == "info":
        _info(arguments)
    elif arguments.action == "convert":
        _convert(arguments)
    else:
        _replay(arguments)
    return 0


def _start(arguments: argparse.Namespace) -> None:
    from lmcache_lab.record import start_recording

    with connecting.connect(arguments, "trace") as client:
        begun = start_recording(client, arguments.directory)
    server, directory = printable(begun.server), printable(str(begun.dir))
    print(f"{server} records its requests into {directory}; until `lmcache-core trace stop`, every hit costs a call")


def _stop(arguments: argparse.Namespace) -> None:
    from lmcache_lab.record import stop_recording

    with connecting.connect(arguments, "trace") as client:
        ended = stop_recording(client)
    server, directory, lost = printable(ended.server), printable(str(ended.dir)), ended.dropped + ended.missed
    losses = f", and {lost:,} were lost because the disk was too slow or full" if lost else ""
    print(f"{server} has stopped recording: {ended.operations:,} requests are in {directory}{losses}")


def _operations(path: Path, workers: int = 1) -> Iterator[Operation]:
    """The operations of a recording or of JSON lines, where each request goes to the `workers` in turn."""
    from lmcache_lab.recorder import ID_BYTES, Operation
    from lmcache_lab.recordings import is_recording, read_recording
    from lmcache_lab.replaying import REQUEST
    from lmcache_lab.workloads import read_requests

    if is_recording(path):
        yield from read_recording(path)[1]
        return
    for number, (at_ms, blocks) in enumerate(read_requests(path)):
        keys = b"".join(block.to_bytes(ID_BYTES, "big") for block in blocks)
        worker = number % max(1, workers)
        yield Operation(int(1000 * at_ms), 0, worker, REQUEST, 0, REQUEST_BYTES, keys, True, 0, b"")


def _info(arguments: argparse.Namespace) -> None:
    import msgspec

    from lmcache_lab.recordings import is_recording, read_recording

    summary: dict[str, Any] = {}
    if is_recording(arguments.trace):
        summary = msgspec.to_builtins(read_recording(arguments.trace)[0])
    summary |= _summary(_operations(arguments.trace))
    if arguments.json:
        print(json.dumps(summary, indent=2))
        return
    rows = [(name, _shown(value)) for name, value in summary.items()]
    print_table(("", arguments.trace.name), rows)


def _summary(operations: Iterable[Operation]) -> dict[str, Any]:
    from lmcache_lab.recorder import ID_BYTES, LOOKUP

    kinds: Counter[str] = Counter()
    workers: set[int] = set()
    unique: set[tuple[int, bytes]] = set()
    keys = looked_up = hits = last_us = 0
    for operation in operations:
        kinds[operation.kind] += 1
        workers.add(operation.worker)
        unique.update((operation.space, each) for each in operation.ids())
        keys += len(operation.keys) // ID_BYTES
        last_us = max(last_us, operation.at_us)
        if operation.kind == LOOKUP:
            looked_up += len(operation.keys) // ID_BYTES
            hits += operation.hits
    return {
        "operations": dict(kinds),
        "workers": len(workers),
        "seconds": round(last_us / 1e6, 3),
        "keys": keys,
        "unique_keys": len(unique),
        "looked_up": looked_up,
        "hit_rate": round(hits / looked_up, 6) if looked_up else None,
    }


def _convert(arguments: argparse.Namespace) -> None:
    from lmcache_core.errors import UsageError

    make = _lookup_hash_lines if arguments.format == "lookup_hash" else _hash_ids_lines
    lines = (json.dumps(line, separators=(",", ":")) + "\n" for line in make(arguments.trace))
    if str(arguments.output) == "-":
        sys.stdout.writelines(lines)
        return
    try:
        with arguments.output.open("x", encoding="utf-8") as file, ExitStack() as undo:
            undo.callback(arguments.output.unlink)  # unless it becomes whole
            file.writelines(lines)
            file.flush()
            undo.pop_all()
    except FileExistsError as error:
        raise UsageError(f"{arguments.output} exists", cure="name another file, or remove it") from error
    except OSError as error:
        raise UsageError(f"{arguments.output} cannot be written: {error.strerror}") from error


def _hash_ids_lines(path: Path) -> Iterator[dict[str, Any]]:
    from lmcache_lab.recordings import is_recording, read_recording, requests_of
    from lmcache_lab.workloads import read_requests

    if is_recording(path):
        for at_us, blocks in requests_of(read_recording(path)[1]):
            yield {"timestamp": at_us // 1000, "hash_ids": blocks}
    else:
        for at_ms, blocks in read_requests(path):
            yield {"timestamp": int(at_ms), "hash_ids": blocks}


def _lookup_hash_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The namespace of the recording stands in for the model. Fields that were not recorded are empty."""
    from lmcache_core.errors import UsageError
    from lmcache_core.limits import CHUNK_TOKENS
    from lmcache_lab.recorder import LOOKUP
    from lmcache_lab.recordings import is_recording, read_recording
    from lmcache_lab.replaying import REQUEST

    began_s, chunk_tokens, kinds = 0.0, CHUNK_TOKENS, {REQUEST}
    if is_recording(path):
        header, _ = read_recording(path)
        began_s, chunk_tokens = header.began_at_s, header.about.get("chunk_tokens", CHUNK_TOKENS)
        if type(chunk_tokens) is not int or chunk_tokens < 1:
            raise UsageError(f"{path} is damaged: its header says chunk_tokens = {chunk_tokens!r}")
        kinds = {LOOKUP}
    for number, operation in enumerate(each for each in _operations(path) if each.kind in kinds and each.keys):
        hashes = operation.ids()
        yield {
            "timestamp": round(began_s + operation.at_us / 1e6, 6),
            "request_id": str(number),
            "model_name": f"{operation.space:016x}",
            "chunk_size": chunk_tokens,
            "seq_len": chunk_tokens * len(hashes),
            "dtypes": [],
            "shapes": [],
            "chunk_hashes": [f"0x{each.hex()}" for each in hashes],
        }


def _replay(arguments: argparse.Namespace) -> None:
    from lmcache_lab.replaying import replay_trace

    result = replay_trace(
        _operations(arguments.trace, arguments.workers or 1),
        lambda: connecting.connect(arguments, "trace replay", maps_pool=True),
        speed=arguments.speed,
        object_bytes=arguments.object_bytes,
    )
    summary = _figures_of(result)
    if arguments.json:
        print(json.dumps(summary, indent=2))
    else:
        print_table(("", "replay"), [(name, _shown(value)) for name, value in summary.items()])


def _figures_of(result: ReplayResult) -> dict[str, Any]:
    rate = result.recorded_hit_rate
    return {
        "operations": result.operations,
        "keys": result.keys,
        "hit_rate": round(result.hit_rate, 6),
        "recorded_hit_rate": None if rate is None else round(rate, 6),
        "refused_objects": result.refused,
        "seconds": round(result.seconds, 3),
        "late_s": round(result.late_s, 3),
        "ms": {
            kind: {f"p{p}": round(1e3 * _percentile(took, p), 3) for p in _PERCENTILES}
            for kind, took in sorted(result.took_s.items())
        },
    }


def _percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{printable(name)} {_shown(each)}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) else "" if value is None else printable(str(value))
