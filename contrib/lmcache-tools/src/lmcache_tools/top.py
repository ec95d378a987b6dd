"""`lmcache-core top`: watch what a running server does, on a terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import socket
import sys
import textwrap
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from lmcache_core.cli import connecting
from lmcache_core.cli.table import plain_table
from lmcache_core.errors import DisconnectedError, UsageError, printable
from lmcache_core.observe.readable import duration, size
from lmcache_tools.overview import overview

if TYPE_CHECKING:
    from lmcache_core import Client

Figures = Mapping[str, Any]

INTERVAL_S = 2.0
_COLUMNS = 80
_BAR = 20
_MISSES_SHOWN = 6
_HOLDERS_SHOWN = 5
_EVENTS_SHOWN = 6
_NAME_MAX = 16  # characters of a name in a table
# Use the terminal's alternate screen, so that its previous content comes back, and hide the cursor. Each line ends with
# the code that clears the rest of the line, to avoid flicker.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = (
        "On a terminal it runs until q or Ctrl-C. Into a pipe, or with --once, it prints one frame. Rates are known "
        "after one --interval."
    )
    connecting.add_options(parser)
    parser.add_argument(
        "--interval", type=_seconds, metavar="SECONDS", help=f"time between two updates (default: {INTERVAL_S:g})"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object instead; with --interval, one on each line, repeatedly"
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Ask and show; returns 0. Raises DisconnectedError if no server answers the first time."""
    with connecting.connect(arguments, "top") as client:
        looks = Looks(client)
        if arguments.json:
            _print_json(looks, arguments)
        elif arguments.once or not sys.stdout.isatty():
            print("\n".join(frame(_one_look(looks, arguments))))
        else:
            with Heard(client, arguments.server_uid) as events_seen:
                _show(looks, events_seen, arguments.interval or INTERVAL_S)
    return 0


class Looks:
    """Repeated looks at one server, each compared with the previous one."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before: Figures | None = None

    def look(self) -> dict[str, Any]:
        """The current overview. Raises `DisconnectedError`."""
        status = self._client.status()
        before, self._before = self._before, status
        return overview(status, before)


class Heard:
    """The last events of a server that streams them to its own user. For another user's server there are none."""

    def __init__(self, client: Client, server_uid: int | None) -> None:
        self._client = client
        self._server_uid = server_uid
        self._socket: socket.socket | None = None
        self._streams = True
        self.last: deque[str] = deque(maxlen=_EVENTS_SHOWN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Connect once the server answers, and again after a restart."""
        from lmcache_core.client import connect_events

        if self._socket is not None or not self._streams:
            return
        try:
            self._socket = connect_events(self._client.config(), self._server_uid)
            self._streams = self._socket is not None
        except UsageError:  # it belongs to another user
            self._streams = False
        except DisconnectedError:
            return  # it has just ended, or is not listening yet

    def read(self) -> None:
        """Read what has arrived, without waiting."""
        from lmcache_core.observe.stream import PACKET_BYTES_MAX

        while self._socket is not None:
            try:
                packet = self._socket.recv(PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.close()
                return
            self.last.extend(_event(json.loads(line)) for line in packet.splitlines()[-_EVENTS_SHOWN:])

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _event(event: Mapping[str, Any]) -> str:
    """An event on one line."""
    at = time.strftime("%H:%M:%S", time.localtime(event["at_s"])) if "at_s" in event else " " * 8
    about = []
    for name, value in event.items():
        if name in ("event", "at_s") or name.startswith("more_") or value in ("", None, {}):
            continue
        if isinstance(value, list):
            about.append(f"{len(value) + event.get(f'more_{name}', 0):,} {name}")
        else:
            about.append(size(value) if name == "nbytes" else f"{name} {value}")
    return printable(f"{at} {event['event']}: {', '.join(about)}")[:_COLUMNS]


def _one_look(looks: Looks, arguments: argparse.Namespace) -> dict[str, Any]:
    found = looks.look()
    if arguments.interval is not None:
        time.sleep(arguments.interval)
        found = looks.look()
    return found


def _print_json(looks: Looks, arguments: argparse.Namespace) -> None:
    if arguments.once or arguments.interval is None:
        print(json.dumps(_one_look(looks, arguments)))
        return
    while True:
        print(json.dumps(looks.look()), flush=True)
        time.sleep(arguments.interval)


# --- on a terminal --------------------------------------------------------------------------------------------


def _show(looks: Looks, events_seen: Heard, interval_s: float) -> None:
    """Run until q or Ctrl-C. If the server is gone, wait for it."""
    lines = frame(looks.look())
    events_seen.connect()
    with _screen(), _keys() as keys:
        while True:
            _draw(lines)
            if _pressed_q(keys, interval_s):
                return
            try:
                events_seen.connect()
                events_seen.read()
                lines = frame(looks.look(), events_seen.last)
            except DisconnectedError as error:
                lines = [*lines[:1], *_wrap("trouble", f"{error}; retrying")]


def _draw(lines: Sequence[str]) -> None:
    columns, rows = shutil.get_terminal_size()
    shown = [line[:columns] for line in lines[: rows - 1]]
    coloured = [f"{_colour(line)}{line}{_PLAIN}{_REST_OF_LINE}" for line in shown]
    sys.stdout.write(_HOME + "\r\n".join(coloured) + "\r\n" + _REST_OF_SCREEN)
    sys.stdout.flush()


def _colour(line: str) -> str:
    if line.startswith("trouble") and not line.endswith(" none"):
        return _RED
    return _BOLD if line.startswith("lmcache-core") else ""


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """The keys that are pressed; None without a keyboard."""
    if not sys.stdin.isatty():
        yield None
        return
    import termios
    import tty

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _pressed_q(keys: int | None, wait_s: float) -> bool:
    """Wait until the next look. Returns whether the user pressed q."""
    end = time.monotonic() + wait_s
    while (left := end - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left)
        elif select.select([keys], [], [], left)[0]:
            pressed = os.read(keys, 64)
            if not pressed or b"q" in pressed.lower():
                return True
    return False


# --- a frame --------------------------------------------------------------------------------------------------


def frame(figures: Figures, events: Collection[str] = ()) -> list[str]:
    """The lines of an overview and of the last events, 80 columns wide."""
    uptime = duration(figures["uptime_s"])
    lines = [printable(f"lmcache-core {figures['name']}, {figures['state']} for {uptime}, pid {figures['pid']}")]
    lines += _wrap("trouble", "none") if not figures["troubles"] else []
    for trouble in figures["troubles"]:
        lines += _wrap("trouble", trouble)
    lines += ["", *map(_bar, figures["stores"]), ""]
    lines += _rates(figures)
    if figures["misses"]:
        lines += _wrap("misses", _misses(figures["misses"]))
    lines += ["", *_stores(figures["stores"])]
    if figures["tenants"]:
        lines += ["", *_tenants(figures["tenants"])]
    lines += ["", *_holders(figures["holders"])]
    return [*lines, "", *events] if events else lines


def _wrap(name: str, text: str) -> list[str]:
    first, rest = f"{name:9} ", " " * 10
    return textwrap.wrap(
        printable(text), _COLUMNS, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _NAME_MAX else name[: _NAME_MAX - 1] + "…"


def _bar(store: Figures) -> str:
    used, most = store["used_bytes"], store["capacity_bytes"]
    name = f"{_short(store['name']):9} "
    if not most:
        return f"{name}{size(used)}, unbounded"
    share = used / most
    filled = min(_BAR, round(share * _BAR))
    return f"{name}[{'#' * filled}{'.' * (_BAR - filled)}] {share:6.1%}  {size(used)} of {size(most)}"


def _rates(figures: Figures) -> list[str]:
    now, totals = figures["now"] or {}, figures["totals"]

    def rate(name: str, write: Any) -> str:
        return "–" if now.get(name) is None else write(now[name])

    def number(value: float) -> str:
        return f"{value:,.1f}" if value % 1 else f"{value:,.0f}"

    hits = "none yet" if figures["hit_rate"] is None else f"{figures['hit_rate']:.1%}"
    rows = [
        ("hit rate", rate("hit_rate", lambda value: f"{value:.1%}"), hits),
        *((name, rate(name, number), number(totals[name])) for name in ("lookups", "retrieves", "evictions")),
        *((name, rate(f"{name}_bytes", size), size(totals[f"{name}_bytes"])) for name in ("read", "stored")),
    ]
    table = plain_table(
        ("", "per second", "since the start"),
        [(f"{name:9}", *rest) for name, *rest in rows],
        right=(1, 2),
        width=_COLUMNS,
    )
    lines = table.splitlines()
    connected, died = figures["clients"]["connected"], figures["clients"]["died"]
    return [*lines, *_wrap("clients", f"{connected:,} connected, {died:,} died")]


def _misses(misses: Mapping[str, int]) -> str:
    shown = [f"{number:,} {reason}" for reason, number in list(misses.items())[:_MISSES_SHOWN]]
    left = sum(list(misses.values())[_MISSES_SHOWN:])
    return ", ".join([*shown, *([f"{left:,} others"] if left else [])])


def _stores(stores: Sequence[Figures]) -> list[str]:
    def figure(value: int | None) -> str:
        return "" if value is None else f"{value:,}"

    def took(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:.1f}"

    rows = [
        (
            _short(each["name"]),
            *(figure(each[name]) for name in ("objects", "loaded", "stored", "evicted", "waiting")),
            took(each["load_s"]),
            took(each["store_s"]),
            each["state"],
        )
        for each in stores
    ]
    columns = ("where", "objects", "loaded", "stored", "evicted", "waiting", "load ms", "store ms", "state")
    return plain_table(columns, rows, right=range(1, 8), width=_COLUMNS).splitlines()


def _tenants(tenants: Sequence[Figures]) -> list[str]:
    def written(nbytes: int | None) -> str:
        return "none" if nbytes is None else size(nbytes)

    rows = [
        (
            _short(row["tenant"] or "(others)"),
            _short(row["store"]),
            *(written(row[name]) for name in ("used_bytes", "reserved_bytes", "limit_bytes")),
            "" if not row["limit_bytes"] else f"{row['used_bytes'] / row['limit_bytes']:.0%}",
        )
        for row in tenants
    ]
    return plain_table(
        ("tenant", "store", "used", "reserved", "limit", ""), rows, right=range(2, 6), width=_COLUMNS
    ).splitlines()


def _holders(holders: Mapping[str, Figures]) -> list[str]:
    fields = ("promised_bytes", "read_bytes", "pinned_bytes", "quarantined_bytes")
    rows = [
        (_short(name), f"{held['connections']:,}", *(size(held[field]) for field in fields))
        for name, held in list(holders.items())[:_HOLDERS_SHOWN]
    ]
    columns = ("holder", "connections", *(field.removesuffix("_bytes") for field in fields))
    return plain_table(columns, rows, right=range(1, 6), width=_COLUMNS).splitlines()
