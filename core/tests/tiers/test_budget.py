from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from typing import Any

import pytest

from lmcache_core.tiers import budget


@pytest.mark.parametrize("deadline", [math.inf, 1e300, time.monotonic() + 40 * 86400])
def test_a_deadline_further_away_than_sockets_count_is_kept(deadline: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with budget.within(deadline), budget.connect("127.0.0.1", listener.getsockname()[1], deadline) as near:
            far, _ = listener.accept()
            with far, budget.locked(threading.Lock()):
                far.sendall(b"answer")
                assert near.recv(6) == b"answer"


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".b", "."])
def test_a_name_that_cannot_be_a_hosts_is_an_address_that_fails(host: str) -> None:
    with pytest.raises(OSError, match="cannot be a host name"):
        budget.connect(host, 80, time.monotonic() + 10)


def test_a_peer_that_sends_on_and_on_is_left_at_the_bytes_of_the_innermost_budget() -> None:
    left, right = socket.socketpair()
    left.__class__ = budget.BudgetSocket
    with left, right:
        right.sendall(bytes(100))
        with budget.within(math.inf, 60):
            with budget.within(math.inf, 1000):
                assert len(left.recv(40)) == 40
                with pytest.raises(budget.TooManyBytesError):  # the outer one applies, too
                    left.recv(40)
        assert left.recv_into(bytearray(100)) == 20  # without a budget whatever comes
        right.sendall(bytes(50))
        with budget.within(math.inf, 50):
            assert len(left.recv(100)) == 50


def test_a_name_service_that_hangs_costs_one_thread_and_nobody_his_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, asked = threading.Event(), []
    real = socket.getaddrinfo

    def hangs(host: str, port: int, **options: Any) -> Any:
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            return real(host, port, **options)
        asked.append(host)
        goes_on.wait(30)
        return real("127.0.0.1", port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for _ in range(3):
            with pytest.raises(TimeoutError, match="name service"):
                budget.connect("node.example", port, time.monotonic() + 0.05)
        budget.connect("127.0.0.1", port, time.monotonic() + 30).close()
        assert asked == ["node.example"]
        goes_on.set()
        budget.connect("node.example", port, time.monotonic() + 30).close()


@pytest.mark.parametrize("where", ["asked", "being asked"])
def test_a_forked_child_asks_for_a_name_that_its_parent_was_asking_for(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The thread that asked is not the child's, and the lock may have been that of a thread of the parent."""
    goes_on, reached, parent = threading.Event(), threading.Event(), os.getpid()
    real_address, real_start = socket.getaddrinfo, budget.started

    def hang() -> None:
        if os.getpid() == parent:
            reached.set()
            goes_on.wait(30)

    def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            return real_address(host, port, **options)
        if where == "asked":
            hang()
        return real_address("127.0.0.1", port, **options)

    def start(*arguments: Any) -> Any:
        if where == "being asked":
            hang()
        return real_start(*arguments)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(budget, "started", start)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def connect(within_s: float) -> None:
            budget.connect("node.example", port, time.monotonic() + within_s).close()

        thread = threading.Thread(target=connect, args=(30.0,), daemon=True)
        thread.start()
        assert reached.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # where it would wait for a lock that nobody frees
            try:
                connect(10.0)
            except OSError:
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        goes_on.set()
        thread.join()
        assert code == 0
        connect(30.0)
