"""What the kernel itself forbids: engines that a copier may not look into, each of them a real process, beside a server
without CAP_SYS_PTRACE."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_copier import messages
from lmcache_core import Layout, Namespace, Status
from lmcache_testing.processes import ServerProcess
from lmcache_testing.waiting import until

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user, and to drop capabilities")

# PR_CAPBSET_DROP: a root process that is executed after it has all capabilities but CAP_SYS_PTRACE.
DROP = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 19, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
WITHOUT_PTRACE = (sys.executable, "-c", DROP)
needs_unshare = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
IN_A_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")

ENGINE = """
import ctypes, json, logging, os, sys
import lmcache_core.client.client  # before it becomes somebody who may not
from lmcache_copier import ServerPages, register_pages
from lmcache_copier.pages import SharedFile
from lmcache_core import Client, Layout, Namespace, PageGroup, Region
from lmcache_core.errors import CacheError
lines = []
class Kept(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("lmcache_copier").addHandler(Kept())
name, run, become = sys.argv[1:]
if become == "another user":
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
if become == "not dumpable":
    assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0
client = Client.connect(name, runtime_dir=run, server_uid=0)
memory = bytearray(b"u" * 4096)
group = PageGroup(Namespace("m", Layout("uint8", (4096,))), [Region(memory, 0, 4096, 4096, 1)], 1)
key = os.urandom(32)
def tried(transfer, **more):
    lines.clear()
    try:
        pages = register_pages(client, [group], transfer, **more)
    except CacheError as error:
        return [type(error).__name__, str(error), lines[:]]
    stored = pages.store([(0, [key], [0])])
    kind = type(pages).__name__
    found = pages.retrieve([(0, [key], [0])]).hits
    pages.close() if isinstance(pages, ServerPages) else None
    return [kind, f"{stored.stored} stored, {found} found, {memory.count(b'u')}", lines[:]]
print(json.dumps({"server": tried("server"), "auto": tried("auto")}))
client.close()
"""


class Server(ServerProcess):
    """With a copier, for the user nobody too; executed by `prefix`."""

    prefix: tuple[str, ...] = WITHOUT_PTRACE

    def _command(self) -> list[str]:
        self.directory.chmod(0o711)  # others may pass through
        tables = {"copier.threads": "1", "copier.uids": str(NOBODY), "copier.gids": str(NOBODY)}
        tables |= {"l1.access": "group", "l1.gids": str(NOBODY)}
        flags = [each for name, value in tables.items() for each in (f"--{name}", value)]
        return [*self.prefix, *super()._command(), *flags]


class FarServer(Server):
    prefix = IN_A_NAMESPACE


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(32 << 20) as made:
        yield ready(made)


def ready(server: Server) -> Server:
    """With a copier that listens."""
    with server.client() as client:
        until(lambda: client.status()["operations"]["copier"]["copier"], "the copier")
    return server


def tried(server: Server, become: str, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """What an engine was answered: by transfer, what came of it, in which words, and what it was warned of."""
    command = [*prefix, sys.executable, "-c", ENGINE, server.name, str(server.runtime_dir), become]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_engine_with_no_more_rights_than_the_copier_is_served(server: Server) -> None:
    found = tried(server, "itself", WITHOUT_PTRACE)
    assert found["server"] == ["ServerPages", "1 stored, 1 found, 4096", []]


@pytest.mark.parametrize(
    ("become", "prefix", "uid"),
    [
        pytest.param("itself", (), 0, id="with more capabilities than the copier"),
        pytest.param("not dumpable", WITHOUT_PTRACE, 0, id="not dumpable"),
        pytest.param("another user", (), NOBODY, id="another user"),
    ],
)
def test_an_engine_that_may_not_be_traced_is_told_so_and_copies_itself_only_if_asked(
    server: Server, become: str, prefix: tuple[str, ...], uid: int
) -> None:
    found = tried(server, become, prefix)
    kind, why, _ = found["server"]
    assert kind == "UsageError"
    assert "the copier (uid 0) may not read the memory of pid" in why
    assert f"(uid {uid})" in why
    for cure in ("no more capabilities", "CAP_SYS_PTRACE", "PR_SET_DUMPABLE", "a memfd"):
        assert cure in why
    assert_copies_itself(found, "may not read the memory of pid")


@needs_unshare
def test_an_engine_in_a_pid_namespace_of_its_own_is_told_so(server: Server) -> None:
    found = tried(server, "itself", IN_A_NAMESPACE)
    assert found["server"][0] == "DisconnectedError"
    assert "runs in another pid namespace" in found["server"][1]
    assert_copies_itself(found, "another pid namespace")


@needs_unshare
def test_a_copier_in_a_pid_namespace_of_its_own_says_so() -> None:
    with FarServer(32 << 20) as server:
        found = tried(ready(server), "itself")
    assert found["server"][0] == "UsageError"
    assert "shareProcessNamespace or hostPID" in found["server"][1]
    assert_copies_itself(found, "another pid namespace")


def assert_copies_itself(found: dict[str, Any], why: str) -> None:
    """Where it left the choice to us, with one warning."""
    kind, done, (warning,) = found["auto"]
    assert (kind, done) == ("Pages", "1 stored, 1 found, 4096")
    assert warning.startswith("the engine copies its pages itself: ")
    assert why in warning


# --- a pid that is somebody else's ------------------------------------------------------------------------------

REUSED = """
import ctypes, errno, mmap, os, socket, struct, sys
from array import array
sys.path.insert(0, sys.argv[3])
from lmcache_copier import messages as m
from lmcache_copier.pages import ServerPages
from lmcache_core import Client, Layout, Namespace, PageGroup, Region
out = os.dup(1)
def say(line): os.write(out, (line + "\\n").encode())
client = Client.connect(sys.argv[1], runtime_dir=sys.argv[2])
memory = mmap.mmap(-1, 8 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = b"e" * len(memory)
group = PageGroup(Namespace("m", Layout("uint8", (4096,))), [Region(memory, 0, 4096, 4096, 8)], 1)
pages = ServerPages(client, client.register_pages([group]))
found, missing = bytes([1]) * 32, bytes([2]) * 32
assert pages.store([(0, [found], [0])]).stored == 1
link, number = pages.registration()
mine = os.getpid()
def is_the_copiers(fd):
    try:
        with socket.socket(fileno=os.dup(fd)) as each:
            return "/copier" in str(each.getpeername())
    except OSError:
        return False
sock = os.dup(next(filter(is_the_copiers, range(256))))
go_in, go_out = os.pipe()
if os.fork():
    os._exit(0)  # the engine has ended; its connection lives on, in a child with the same memory
os.close(2)
tids, libc, taker = array("i", [mine]), ctypes.CDLL(None, use_errno=True), -1
words = struct.pack("11Q", 0, 0, 0, 0, 17, 0, 0, 0, tids.buffer_info()[0], 1, 0)
while taker < 0:  # clone3, with a pid of our choice, once that is free
    taker = libc.syscall(435, words, len(words))
    if taker < 0 and ctypes.get_errno() != errno.EEXIST:
        say("no such call")
        os._exit(0)
if taker == 0:  # its memory has the engine's mark, too, at the same place
    memory[:] = b"t" * len(memory)
    say("ready" if os.getpid() == mine else "another pid")
    os.read(go_in, 1)
    say("untouched" if memory[:] == b"t" * len(memory) else "written")
    os._exit(0)
os.close(out)
from lmcache_copier.channel import Incoming, send
over = socket.socket(fileno=sock)
answers = os.fdopen(os.dup(int(sys.argv[4])), "w")
incoming = Incoming(over, m.CopierReply)
def ask(message):
    send(over, message)
    while True:
        for each in incoming.messages():
            return each
        assert incoming.receive(), "it hung up"
store = ask(m.StorePages(900, number, [m.JobEntry(0, missing, array("q", [1]).tobytes())], None, False))
load = ask(m.RetrievePages(901, number, [m.JobEntry(0, found, array("q", [2]).tobytes())], None, 0))
print(list(store.statuses[0]), list(load.statuses[0]), store.fault, sep=";", file=answers, flush=True)
os.write(go_out, b".")
"""


def test_a_process_that_has_the_engines_pid_and_its_mark_is_neither_read_nor_written(server: Server) -> None:
    """The engine forks and ends. The child takes the connection, and starts a process with the engine's old pid, whose
    memory is a copy of the engine's: mark, addresses and all."""
    hears, says = os.pipe()
    command = [
        *WITHOUT_PTRACE,
        sys.executable,
        "-c",
        REUSED,
        server.name,
        str(server.runtime_dir),
        str(Path(__file__).parent),
        str(says),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[says])
    os.close(says)
    process.wait(60)
    assert process.stdout is not None
    with process.stdout, os.fdopen(hears) as answers:
        if (line := process.stdout.readline().strip()) == "no such call":
            pytest.skip("this kernel lets nobody choose a pid")
        assert line == "ready"
        aborted = [messages.STATUSES[Status.ABORTED]]
        store, load, fault = answers.readline().strip().split(";")
        assert (store, load) == (str(aborted), str(aborted))
        assert fault
        assert process.stdout.readline().strip() == "untouched"
    with server.client() as client:
        layout = Namespace("m", Layout("uint8", (4096,)))
        assert client.lookup([bytes([2]) * 32], namespace=layout).hits == 0
        assert client.lookup([bytes([1]) * 32], namespace=layout).hits == 1
