"""Quotas of tenants set while a server runs: over a whole server with a disk, through restarts and kills."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from lmcache_core.cli.main import main
from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.settings.model import Settings
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import WAIT_S, until

pytest.importorskip("lmcache_fs")

LAYOUT = Layout("uint8", (4096,))
CHAT, SEARCH = Namespace("chat", LAYOUT), Namespace("search", LAYOUT)
Run = Callable[..., "Node"]


def keys(first: int, count: int) -> list[bytes]:
    return [hashlib.sha256(b"quota %d" % number).digest() for number in range(first, first + count)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # deleted just now
        return 0


class Node:
    """`lmcache-core serve` with a pool of 64 MiB, and a disk."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.disk = folder / "disk"
        self.run = folder / "run"
        options = {
            "name": name, "runtime_dir": self.run, "state_dir": folder / "state", "l1.size_bytes": "64MiB",
            "l1.keep_pool": "true", "l2.disk.type": "fs", "l2.disk.path": self.disk,
            "l2.disk.capacity_bytes": "256MiB", "log-level": "error", "drain_s": "0.5",
        }  # fmt: skip
        flags = [word for option, value in options.items() for word in (f"--{option}", str(value))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmcache_core.cli.main", "serve", *flags], cwd=folder, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline()
        self.client = Client.connect(name, runtime_dir=self.run)
        until(lambda: self.client.status()["pool"]["populated_bytes"] == self.client.status()["l1"]["pool_bytes"])

    def store(self, namespace: Namespace, first: int, count: int) -> Counter[Status]:
        return Counter(self.client.store(keys(first, count), [bytes(4096)] * count, namespace=namespace).statuses)

    def used(self, tenant: str, store: str = "l1") -> int | None:
        """Bytes, as `quota get` tells."""
        row = next((row for row in self.client.quotas() if row["tenant"] == tenant), None)
        return None if row is None else row["stores"][store]["used_bytes"]

    def resident(self, namespace: Namespace, first: int, count: int) -> int:
        """The second door: what a lookup that asks no tier finds."""
        found = self.client.lookup(keys(first, count), namespace=namespace, prefix=False, tiers=[]).statuses
        return sum(status is Status.GRANTED for status in found)

    def on_disk(self) -> int:
        """The second door: files of objects."""
        return sum(size > 4096 for size in map(_size, self.disk.rglob("*")))

    def stored_on_disk(self, objects: int) -> None:
        until(lambda: self.client.status()["tiers"]["tiers"][0]["objects"] == objects)

    def end(self, how: int = signal.SIGTERM) -> None:
        self.client.close()
        if self.process.poll() is None:
            os.kill(self.process.pid, how)
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Run]:
    name, made = f"q{uuid4().hex[:10]}", []

    def start() -> Node:
        made.append(Node(tmp_path, name))
        return made[-1]

    yield start
    for each in made:
        each.end()
    segment_path(name).unlink(missing_ok=True)  # kept for the next server, and there is none


def test_a_limit_in_the_pool_holds_at_once_and_for_what_is_written(node: Run) -> None:
    served = node()
    assert served.store(CHAT, 0, 1000) == {Status.STORED: 1000}
    assert served.store(SEARCH, 0, 200) == {Status.STORED: 200}
    served.stored_on_disk(1200)
    served.client.quota_set("chat", {"l1": {"limit_bytes": 100 * 4096}}, [CHAT.id])
    until(lambda: served.resident(CHAT, 0, 1000) == 100)
    assert served.used("chat") == 100 * 4096
    assert served.resident(SEARCH, 0, 200) == 200
    lease = served.client.prepare_store(keys(5000, 150), namespace=CHAT)
    assert Counter(lease.statuses)[Status.QUOTA] == 50, "from the first byte of a write in flight"
    assert served.used("chat") == 100 * 4096
    lease.close()
    served.client.quota_set("chat", {"l1": {"limit_bytes": 300 * 4096}})
    assert served.store(CHAT, 6000, 300)[Status.STORED] == 300
    served.client.quota_remove("chat")
    assert served.store(CHAT, 7000, 600) == {Status.STORED: 600}
    assert served.resident(CHAT, 6000, 300) == 300


def test_a_limit_on_a_tier_deletes_what_is_beyond_it_and_nothing_of_others(node: Run) -> None:
    served = node()
    served.store(CHAT, 0, 200)
    served.store(SEARCH, 0, 100)
    served.stored_on_disk(300)
    one = served.client.status()["tiers"]["tiers"][0]["bytes_used"] // 300
    served.client.quota_set("chat", {"disk": {"limit_bytes": 50 * one}}, [CHAT.id])
    until(lambda: served.on_disk() == 150)
    assert served.used("chat", "disk") == 50 * one
    served.store(CHAT, 1000, 80)
    until(lambda: served.client.status()["tiers"]["stores"]["dirty"].get("disk", 0) == 0)
    until(lambda: served.on_disk() == 150)
    with pytest.raises(UsageError, match="no store is named 'ssd': there are l1, disk"):
        served.client.quota_set("chat", {"ssd": {"limit_bytes": 1}})


def test_what_was_set_is_done_after_a_kill_that_comes_before_its_effect(node: Run) -> None:
    served = node()
    served.store(CHAT, 0, 4000)
    served.stored_on_disk(4000)
    served.client.quota_set("chat", {"l1": {"limit_bytes": 64 * 4096}, "disk": {"limit_bytes": 0}}, [CHAT.id])
    served.end(signal.SIGKILL)
    again = node()
    until(lambda: again.used("chat") is not None and again.used("chat") <= 64 * 4096)
    until(lambda: again.resident(CHAT, 0, 4000) <= 64)
    until(lambda: again.on_disk() == 0)
    again.end()
    third = node()
    assert third.store(CHAT, 9000, 50)[Status.STORED] == 50
    until(lambda: third.used("chat") == 64 * 4096)


def test_a_reserve_is_free_for_who_has_it_in_a_pool_that_others_filled(node: Run) -> None:
    served = node()
    pool_bytes = served.client.status()["l1"]["pool_bytes"]
    reserve = pool_bytes // 4 // 4096
    served.client.quota_set("chat", {"l1": {"reserved_bytes": reserve * 4096}}, [CHAT.id])
    for first in range(0, 20000, 1000):
        served.store(SEARCH, first, 1000)
    for first in range(0, reserve, 1000):
        served.store(CHAT, first, min(1000, reserve - first))
    for first in range(20000, 40000, 1000):
        served.store(SEARCH, first, 1000)
    assert served.resident(CHAT, 0, reserve) == reserve
    with pytest.raises(UsageError, match="do not fit: reserve less"):
        served.client.quota_set("more", {"l1": {"reserved_bytes": pool_bytes}}, [SEARCH.id])
    with pytest.raises(UsageError, match="belongs to tenant 'chat'"):
        served.client.quota_set("more", {}, [CHAT.id])


def test_the_command_sets_shows_and_ends_quotas(node: Run, capsys: pytest.CaptureFixture[str]) -> None:
    served = node()
    where = ["--name", served.name, "--runtime-dir", str(served.run)]
    served.store(CHAT, 0, 10)
    assert main(["quota", "set", "chat", "--namespace", f"{CHAT.id:016x}", "--limit", "8MiB", *where]) == 0
    assert main(["quota", "set", "chat", "--reserved", "1MiB", *where]) == 0
    assert main(["quota", "set", "chat", "--store", "disk", "--limit", "16MiB", *where]) == 0
    first, _, last = capsys.readouterr().out.splitlines()
    assert first == f"tenant 'chat', from now on: namespaces {CHAT.id:016x}; l1: nothing reserved, limit 8MiB"
    assert last.endswith("; l1: 1MiB reserved, limit 8MiB; disk: nothing reserved, limit 16MiB")
    until(lambda: served.used("chat") == 10 * 4096)
    assert main(["quota", "get", "chat", "--json", *where]) == 0
    told = json.loads(capsys.readouterr().out)[0]
    assert told["namespaces"] == [f"{CHAT.id:016x}"]
    assert told["stores"]["l1"] == {"used_bytes": 40960, "reserved_bytes": 1 << 20, "limit_bytes": 8 << 20}
    assert told["stores"]["disk"]["limit_bytes"] == 16 << 20
    assert main(["quota", "get", *where]) == 0
    table = capsys.readouterr().out
    assert "chat" in table
    assert max(map(len, table.splitlines())) <= 80
    assert main(["quota", "delete", "chat", *where]) == 0
    assert capsys.readouterr().out == "tenant 'chat' has no quota any more; its objects stay\n"
    assert main(["quota", "get", "chat", *where]) == 2
    assert main(["quota", "set", "chat", "--limit", "8MB", *where]) == 2
    assert "at least one of its namespaces must be named" in capsys.readouterr().err


def kept(reserved_bytes: int | None = None, namespaces: Sequence[int] = (1,), name: str = "chat") -> Json:
    return {name: {"namespaces": namespaces, "stores": {"l1": {"reserved_bytes": reserved_bytes}}}}


@pytest.mark.parametrize(
    "text",
    [
        '{"chat": {',
        json.dumps(kept(10**25)),
        json.dumps(kept(-1)),
        json.dumps(kept(namespaces=[-1])),
        json.dumps(kept(namespaces=[1 << 70])),
        json.dumps(kept(namespaces=[])),
        json.dumps(kept(name="\033[2J")),
        json.dumps(kept(name="one") | kept(name="two")),
    ],
)
def test_quotas_that_cannot_be_read_stop_the_start_with_the_cure(tmp_path: Path, text: str) -> None:
    from lmcache_core.plugins.loader import load_plugins
    from lmcache_core.server.server import Server
    from lmcache_core.settings.compose import make_settings

    (tmp_path / "torn.quotas.json").write_text(text)
    made = make_settings(
        load_plugins(), name="torn", l1={"size_bytes": 1 << 20, "backing": "memfd"},
        runtime_dir=str(tmp_path / "run"), state_dir=str(tmp_path),
    )  # fmt: skip
    with pytest.raises(SettingsError, match="delete it and set the quotas anew"):
        Server(made, load_plugins())


QUOTAS = f"""
[quotas.team]
namespaces = ["{CHAT.id:016x}"]

[quotas.team.stores.l1]
reserved_bytes = "8MiB"
limit_bytes = "16MiB"

[quotas.team.stores.disk]
limit_bytes = "32MiB"
"""


def settings_of(tmp_path: Path, text: str, evictions: dict[str, object] | None = None, name: str = "") -> Settings:
    stores: dict[str, dict[str, object]] = {
        "l1": {"size_bytes": "64MiB", "backing": "memfd"},
        "disk": {"type": "fs", "path": str(tmp_path / "disk"), "capacity_bytes": "64MiB"},
    }
    for store, policy in (evictions or {}).items():
        stores[store]["eviction"] = policy
    options = {
        "name": name or f"q{uuid4().hex[:8]}",
        "runtime_dir": str(tmp_path / "run"),
        "state_dir": str(tmp_path / "state"),
    }
    return make_settings(**options, l1=stores["l1"], l2={"disk": stores["disk"]}, **tomllib.loads(text))


def stores_of(server: Server) -> dict[str, Json]:
    with server.connect() as client:
        return {row["tenant"]: row["stores"] for row in client.quotas() if row["tenant"]}


def test_tenants_of_the_settings_have_their_quotas_from_the_start(tmp_path: Path) -> None:
    with Server(settings_of(tmp_path, QUOTAS)).start() as server, server.connect() as client:
        told = stores_of(server)["team"]
        assert (told["l1"]["reserved_bytes"], told["l1"]["limit_bytes"]) == (8 << 20, 16 << 20)
        assert told["disk"]["limit_bytes"] == 32 << 20
        statuses = client.store(keys(0, 4200), [bytes(4096)] * 4200, namespace=CHAT).statuses
        assert set(statuses) <= {Status.STORED, Status.QUOTA, Status.WARMING}
        assert stores_of(server)["team"]["l1"]["used_bytes"] <= 16 << 20


def test_what_was_set_at_run_time_goes_before_the_settings_until_it_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(tmp_path, QUOTAS)
    with Server(settings).start() as server, server.connect() as client:
        client.quota_set("team", {"l1": {"limit_bytes": 24 << 20}})
        assert stores_of(server)["team"]["l1"]["limit_bytes"] == 24 << 20
    with Server(settings).start() as server, server.connect() as client:
        assert stores_of(server)["team"]["l1"]["limit_bytes"] == 24 << 20
        assert "quota delete team" in caplog.text
        client.quota_remove("team")
        assert "team" not in stores_of(server)
    with Server(settings).start() as server:
        assert stores_of(server)["team"]["l1"]["limit_bytes"] == 16 << 20


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (QUOTAS.replace("stores.disk", "stores.nowhere"), "no store is named 'nowhere'"),
        (QUOTAS.replace("8MiB", "65MiB").replace("16MiB", "66MiB"), "do not fit"),
        (QUOTAS.replace("8MiB", "17MiB"), "exceeds limit_bytes"),
        (QUOTAS + QUOTAS.replace("quotas.team", "quotas.other"), "belongs to tenant '"),
        (QUOTAS.replace('["', '["not hex '), "namespaces"),
        (QUOTAS.replace("limit_bytes", "limit"), "limit"),
    ],
)
def test_quotas_that_cannot_be_meant_end_the_start_with_their_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as refused:
        Server(settings_of(tmp_path, text))
    assert "quotas." in str(refused.value)


def isolated(tmp_path: Path, text: str = "", store: str = "l1", name: str = "") -> Settings:
    """CHAT is tenant `team`'s by the policy of the pool, or of the disk."""
    pytest.importorskip("lmcache_policies")
    policy = {"type": "isolated", "tenants": {"team": {"namespaces": [f"{CHAT.id:016x}"], "quota_bytes": "8MiB"}}}
    return settings_of(tmp_path, text, {store: policy}, name)


@pytest.mark.parametrize("store", ["l1", "disk"])
def test_a_namespace_that_the_policy_gives_to_one_tenant_gets_no_quota_of_another(tmp_path: Path, store: str) -> None:
    with Server(isolated(tmp_path, store=store)).start() as server, server.connect() as client:
        figures = {store: {"limit_bytes": 4 << 20}}
        refusal = f"settings of {store}'s eviction policy give namespace {CHAT.id:016x} to tenant 'team'"
        with pytest.raises(UsageError, match=refusal):
            client.quota_set("other", figures, [CHAT.id])
        with pytest.raises(UsageError, match=refusal):
            client.quota_set("other", figures, [SEARCH.id, CHAT.id])
        assert "other" not in stores_of(server)
        client.quota_set("team", figures, [CHAT.id])  # its own
        client.quota_set("team", figures, [SEARCH.id])  # with other namespaces
        client.quota_set("other", figures, [CHAT.id])  # which is nobody's since
        assert stores_of(server)["other"][store]["limit_bytes"] == 4 << 20


@pytest.mark.parametrize("store", ["l1", "disk"])
def test_settings_that_give_a_namespace_to_two_tenants_end_the_start_with_both_names(
    tmp_path: Path, store: str
) -> None:
    text = QUOTAS.replace("quotas.team", "quotas.other")
    with pytest.raises(SettingsError, match=r"quotas\.other: the settings of .* to tenant 'team'"):
        Server(isolated(tmp_path, text, store))


def test_a_tier_whose_new_policy_gives_a_namespace_to_another_tenant_than_the_quotas_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_policies")
    text = f'[quotas.other]\nnamespaces = ["{CHAT.id:016x}"]\n[quotas.other.stores.disk]\nlimit_bytes = "4MiB"\n'
    policy = {"type": "isolated", "tenants": {"team": {"namespaces": [f"{CHAT.id:016x}"], "quota_bytes": "8MiB"}}}
    with Server(settings_of(tmp_path, text)).start() as server, server.connect() as client:
        assert server.tiering is not None
        (before,) = server.tiering.tiers
        with pytest.raises(
            SettingsError, match=r"quotas\.other: the settings of disk's eviction policy give .* 'team'"
        ):
            client.tiers_reconfigure("disk", {"eviction": policy})
        assert [*server.tiering.tiers] == [before]
        assert stores_of(server)["other"]["disk"]["limit_bytes"] == 4 << 20


def test_a_quota_that_was_set_before_the_policy_got_the_namespace_holds_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = settings_of(tmp_path, "")
    with Server(before).start() as server, server.connect() as client:
        client.quota_set("other", {"l1": {"limit_bytes": 4 << 20}}, [CHAT.id])
    with Server(isolated(tmp_path, name=before.name)).start() as server, server.connect() as client:
        assert "'other' was set at run time, and takes precedence over the settings: the settings of l1" in caplog.text
        until(lambda: client.status()["pool"]["populated_bytes"] == client.status()["l1"]["pool_bytes"])
        client.store(keys(0, 2000), [bytes(4096)] * 2000, namespace=CHAT)
        assert 0 < stores_of(server)["other"]["l1"]["used_bytes"] <= 4 << 20
