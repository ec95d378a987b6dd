"""`tiers`: what each change says, and who is asked before one is removed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest

from lmcache_core.cli.main import main
from lmcache_core.client.client import Client
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import WAIT_S, until

SPACE = Namespace("m", Layout("uint8", (4096,)))


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    pytest.importorskip("lmcache_mock")
    return start(l1={"size_bytes": 8 << 20, "backing": "memfd"}, l2={"fast": {"type": "mock"}})


def tiers(server: Server, *words: str) -> list[str]:
    return [
        "tiers",
        *words,
        "--name",
        server.parts.settings.name,
        "--runtime-dir",
        str(server.parts.settings.runtime_dir),
    ]


def names(client: Client) -> list[str]:
    return [tier["name"] for tier in client.tiers_list()]


def answered(answer: bytes, argv: list[str]) -> tuple[int, str]:
    """The command on a terminal where somebody types this once asked; its status, and all that is shown."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lmcache_core.cli.main", *argv]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
            if answer and b"[y/N]" in shown:
                os.write(ours, answer)
                answer = b""
    except OSError:  # the command has ended
        pass
    finally:
        os.close(ours)
    return process.wait(WAIT_S), shown.decode()


def test_each_change_says_what_has_happened(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert main(tiers(server, *words)) == 0
        return capsys.readouterr().out

    with server.connect() as client:
        assert client.store([bytes(32)], [bytes(4096)], namespace=SPACE).stored == 1
        until(lambda: client.tiers_list()[0]["objects"] == 1, "the store")
    assert (
        said("add", "cold", "--set", "type=mock") == "tier 'cold' is added, as the last; tiers in order: fast, cold\n"
    )
    assert said("drain", "fast").startswith("tier 'fast' gets no more stores; it serves 1 objects (")
    assert "accepts stores; tiers in order: fast, cold" in said("reconfigure", "fast", "--set", "capacity_bytes=1GiB")
    assert said("remove", "fast", "--yes") == "tier 'fast' is removed; what it holds stays on its medium\n"


def test_remove_asks_and_takes_only_yes_for_an_answer(server: Server) -> None:
    with server.connect() as client:
        for answer in (b"n\n", b"\n", b"\x04"):
            status, shown = answered(answer, tiers(server, "remove", "fast"))
            assert (status, names(client)) == (1, ["fast"])
            assert "tier 'fast': it serves 0 objects" in shown
            assert "nothing has changed" in shown
        status, shown = answered(b"y\n", tiers(server, "remove", "fast"))
        assert (status, names(client)) == (0, [])
        assert "is removed" in shown


def test_where_nobody_can_be_asked_remove_wants_yes(server: Server) -> None:
    command = [sys.executable, "-m", "lmcache_core.cli.main", *tiers(server, "remove", "fast")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("nobody can be asked whether tier 'fast' may be removed: give --yes")
    with server.connect() as client:
        assert names(client) == ["fast"]
    done = subprocess.run([*command[:-5], "slow", *command[-4:]], capture_output=True, text=True, check=False)
    assert "no tier is named 'slow'" in done.stderr, "that is no question"


def test_a_wrong_setting_is_named_as_the_command_takes_it(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tiers(server, "add", "more", "--set", "type=mock", "--set", "latency=1")) == 2
    wrong = "--set latency (latency) is not a setting: did you mean '--set latency_s'?"
    assert capsys.readouterr().err == f"lmcache-core: {wrong}\n"
