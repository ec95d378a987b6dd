"""`top` as a person sees it: through a terminal of 80 columns, and into a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from lmcache_core.client.client import Client
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S
from lmcache_tools.overview import overview
from lmcache_tools.top import frame

NBYTES = 65536
SPACE = Namespace("watched", Layout("uint8", (NBYTES,)))
COMMAND = [sys.executable, "-m", "lmcache_core.cli.main"]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


Start = Callable[[], Server]


@pytest.fixture
def start(start: Callable[..., Server]) -> Start:
    """A server of always the same name, in this process."""
    name = f"top{uuid4().hex[:8]}"
    return lambda: start(name=name, l1={"size_bytes": 16 << 20, "backing": "memfd"}, subscribers={"stream": {}})


def where(server: Server) -> list[str]:
    return ["--name", server.parts.settings.name, "--runtime-dir", str(server.parts.settings.runtime_dir)]


def asked(client: Client) -> None:
    """Three quarters of what is looked up is there."""
    assert client.store([key(each) for each in range(6)], [bytes(NBYTES)] * 6, namespace=SPACE).stored == 6
    assert client.lookup([key(each) for each in range(8)], namespace=SPACE).hits == 6


class Terminal:
    """A command in a terminal of 80 by 40, and what is on its screen: each line as it was written last."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 80, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment["TERM"] = "xterm"
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # its terminal: Ctrl-C interrupts it
        )
        os.close(theirs)
        self.text = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a text in what has come since the last screen."""
        end = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, self.screen)):
            assert time.monotonic() < end, self.screen
            self.read(end - time.monotonic())
        return found

    @property
    def screen(self) -> str:
        """The newest whole screen."""
        screens = self.text.split("\x1b[H")
        whole = next((each for each in reversed(screens) if each.endswith("\x1b[J")), "")
        return ESCAPES.sub("", whole).replace("\r", "")

    def press(self, letters: bytes) -> None:
        os.write(self._ours, letters)

    def end(self) -> int:
        """Read what is left; the exit status."""
        while self.read(WAIT_S):
            pass
        return self.process.wait(WAIT_S)

    def read(self, wait_s: float) -> bool:
        assert select.select([self._ours], [], [], max(0.0, wait_s))[0], self.screen
        try:
            part = os.read(self._ours, 65536)
        except OSError:  # as Linux ends a terminal
            return False
        self.text += part.decode(errors="replace")
        return bool(part)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def begin(*words: str) -> Terminal:
        made.append(Terminal(*words))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def test_top_follows_the_server_through_a_restart_and_leaves_the_terminal_as_it_was(
    start: Start, terminal: Callable[..., Terminal]
) -> None:
    server = start()
    shown = terminal("top", "--interval", "0.1", *where(server))
    shown.until(r"l1 +\[\.{20}\] +0\.0%")
    with server.connect() as client:
        asked(client)
    shown.until(r"l1 +\[\.{20}\] +2\.3%  384\.0 KiB of 16\.0 MiB")
    shown.until(r"hit rate +\S+ +75\.0%")
    shown.until(r"admitted: .*6 keys, 384\.0 KiB")
    assert all(len(line) <= 80 for line in shown.screen.splitlines())
    server.stop()
    shown.until("retrying")
    start()
    shown.until(r"l1 +\[\.{20}\] +0\.0%")
    shown.until("session_opened: ")
    shown.press(b"q")
    assert shown.end() == 0
    assert shown.text.count("\x1b[?1049h") == shown.text.count("\x1b[?1049l") == 1
    assert shown.text.rindex("\x1b[?25h") > shown.text.rindex("\x1b[?25l")


def test_top_ends_at_an_interrupt_with_the_cursor_back(start: Start, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("top", *where(start()))
    shown.until("lmcache-core top")
    shown.press(b"\x03")
    assert shown.end() == 130
    assert shown.text.rstrip().endswith("\x1b[?1049l")
    assert "Traceback" not in shown.text


def test_into_a_pipe_top_is_one_frame_and_with_json_one_object(start: Start) -> None:
    server = start()
    with server.connect() as client:
        asked(client)

        def printed(*words: str) -> str:
            return subprocess.run(
                [*COMMAND, "top", *words, *where(server)], capture_output=True, text=True, check=True
            ).stdout

        text = printed()
        assert "\x1b" not in text
        assert re.search(r"hit rate +– +75\.0%", text)
        assert re.search(r"misses +1 behind_a_miss, 1 never_stored|misses +1 never_stored, 1 behind_a_miss", text)
        assert max(map(len, text.splitlines())) <= 80
        told = json.loads(printed("--json", "--once", "--interval", "0.1"))
        assert (told["hit_rate"], told["hits"], told["keys"]) == (0.75, 6, 8)
        assert (told["now"]["lookups"], told["now"]["hit_rate"]) == (0, None)
        assert json.loads(printed("--json"))["now"] is None


def test_top_as_json_goes_on_with_an_interval(start: Start) -> None:
    server = start()
    command = [*COMMAND, "top", "--json", "--interval", "0.1", *where(server)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, server.connect() as client:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["keys"] == 0
        asked(client)
        while json.loads(process.stdout.readline())["keys"] != 8:
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130


def test_what_happens_in_a_second_is_of_the_time_between_two_looks(start: Start) -> None:
    server = start()
    with server.connect() as client:
        before = client.status()
        asked(client)
        after = client.status()
    after["server"]["uptime_s"] = before["server"]["uptime_s"] + 2.0
    told = overview(after, before)["now"]
    assert told == pytest.approx(
        {"lookups": 0.5, "retrieves": 0, "read_bytes": 0, "stored_bytes": 3 * NBYTES, "evictions": 0, "hit_rate": 0.75}
    )
    another = {**after, "pool": {**after["pool"], "boot_id": "0" * 16}}
    assert overview(another, before)["now"] is None
    assert overview(before, after)["now"] is None


def crowded(status: dict[str, Any]) -> dict[str, Any]:
    """As of a server with much to say: large figures, long and hostile names."""
    large = 123_456_789_012
    traffic = status["traffic"]
    traffic["lookups"] |= {"keys": large, "hits": large - 7, "hit_rate": 0.999, "hits_by_index": large - 9}
    traffic["lookups"]["misses"] = dict.fromkeys(
        ("never_stored", "evicted", "late", "quota", "damaged", "aborted", "x"), large
    )
    traffic["retrieves"] |= {"keys": large, "hits": large, "hit_rate": 1.0, "bytes": large**2 // 10**9}
    status["server"] |= {"also_at": ["ipc:///run/user/1000/lmcache-core/default/zmq", "tcp://10.0.0.1:5555"]}
    status["l1"]["tenants"] = [{"name": "t" * 64, "used_bytes": large, "reserved_bytes": None, "limit_bytes": large}]
    status["l1"]["holders"] = {
        "key \x1b[31m" + "k" * 60: dict.fromkeys(
            ("connections", "promised_bytes", "read_bytes", "pinned_bytes", "quarantined_bytes"), 1 << 40
        )
    }
    status["pool"]["population_error"] = "\x1b]0;owned\x07 " + "many words " * 12
    return status


def test_tables_fit_80_columns_and_no_name_moves_the_cursor(start: Start) -> None:
    with start().connect() as client:
        status = crowded(client.status())
    told = overview(status, status)
    lines = frame(told)
    assert max(map(len, lines)) <= 80
    assert "owned" in "".join(lines)
    assert not [line for line in lines if "\x1b" in line or "\x07" in line]
