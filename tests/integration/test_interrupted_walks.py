"""Signals to the commands that walk a tier: they end after the object they are at, and the next run goes on there.

The tier is the disk, with a gate in front of its twentieth load: the command stands there until the test has sent
its signal, so nothing here depends on who is faster.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

from ..conftest import Node

pytest.importorskip("lmcache_fs")

OBJECTS = 60
LOADS_BEFORE_THE_GATE = 20

GATED = """
import os
import time
from pathlib import Path

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl
import lmcache_fs.adapter
from lmcache_fs.adapter import FsAdapter

lmcache_fs.adapter._SCAN_PAGE_ENTRIES = 8  # several pages, without a thousand objects for each

class GatedAdapter(FsAdapter):
    loads = 0

    def load(self, items, deadline):
        GatedAdapter.loads += 1
        gate = os.environ.get("TEST_GATE")
        if gate and GatedAdapter.loads == int(os.environ["TEST_GATE_AT"]):
            Path(gate, "reached").touch()
            while not Path(gate, "open").exists():
                time.sleep(0.005)
        return super().load(items, deadline)


@hookimpl
def lmcache_components():
    settings = "lmcache_fs.settings:FsSettings"
    return [ComponentSpec(Kind.L2_ADAPTER, "gated", factory="gated_tier:GatedAdapter", settings=settings)]
"""


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path with the plugin in it, as pip would have left it; and the gate's directory."""
    site = tmp_path / "site"
    info = site / "gated_tier-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "gated_tier.py").write_text(GATED)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gated-tier\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lmcache_core]\ngated = gated_tier\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    gate = tmp_path / "gate"
    gate.mkdir()
    return gate


@pytest.fixture
def config(node: Node, tmp_path: Path) -> Path:
    path = tmp_path / "lmcache.toml"
    path.write_text(
        f'name = "{node.name}"\nruntime_dir = "{node.run}"\n'
        f'[l2.disk]\ntype = "gated"\npath = "{tmp_path / "a"}"\n[l2.other]\ntype = "fs"\npath = "{tmp_path / "b"}"\n'
    )
    return path


def begin(node: Node, gate: Path | None, at: int, *words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "LMCACHE_CORE_NAME": node.name, "LMCACHE_CORE_RUNTIME_DIR": str(node.run)}
    if gate is not None:
        environ |= {"TEST_GATE": str(gate), "TEST_GATE_AT": str(at)}
    argv = [sys.executable, "-m", "lmcache_core.cli.main", *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def interrupted_at_the_gate(node: Node, gate: Path, at: int, number: int, *words: str) -> tuple[int, dict[str, object]]:
    """The exit status and the figures of a command that gets a signal while its load stands at the gate."""
    process = begin(node, gate, at, *words)
    try:
        until(lambda: (gate / "reached").exists() or process.poll() is not None, "the gate")
        process.send_signal(number)
        (gate / "open").touch()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert out, err
    return process.returncode, json.loads(out)


def whole_run(node: Node, *words: str) -> tuple[int, Json]:
    out, err = (process := begin(node, None, 0, *words)).communicate(timeout=60)
    assert out, err
    return process.returncode, json.loads(out)


def filled(node: Node, tmp_path: Path) -> list[bytes]:
    server = node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "a"))
    keys = [node.key(at) for at in range(OBJECTS)]
    with node.client() as client:
        payloads = [node.payload(at) for at in range(OBJECTS)]
        assert client.store(keys, payloads, namespace=node.namespace).stored == OBJECTS
    server.signal(signal.SIGTERM)
    assert server.popen.wait(60) == 0
    return keys


def objects(folder: Path) -> set[str]:
    return {path.name for path in (folder / "objects").rglob("*") if path.is_file()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_verify_ends_after_the_object_it_is_at_and_its_cursor_brings_it_back(
    node: Node, gated: Path, config: Path, tmp_path: Path, number: int
) -> None:
    filled(node, tmp_path)
    cursor = tmp_path / "cursor"
    words = ("verify", "--tier", "disk", "--config", str(config), "--json", "--cursor", str(cursor))
    status, figures = interrupted_at_the_gate(node, gated, LOADS_BEFORE_THE_GATE, number, *words)
    assert (status, figures["interrupted"]) == (130, True)
    assert figures["whole"] == LOADS_BEFORE_THE_GATE
    assert cursor.exists()
    status, rest = whole_run(node, *words)
    assert (status, rest["interrupted"]) == (0, False)
    # A page that was begun is read again; none is left out.
    assert OBJECTS - LOADS_BEFORE_THE_GATE <= rest["whole"] < OBJECTS  # pages before it are not
    assert not cursor.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_copy_ends_after_the_object_it_is_at_and_a_second_run_copies_the_rest(
    node: Node, gated: Path, config: Path, tmp_path: Path, number: int
) -> None:
    filled(node, tmp_path)
    words = ("copy", "--from", "disk", "--to", "other", "--config", str(config), "--json")
    status, figures = interrupted_at_the_gate(node, gated, LOADS_BEFORE_THE_GATE, number, *words)
    assert (status, figures["copied"]) == (130, LOADS_BEFORE_THE_GATE)
    assert len(objects(tmp_path / "b")) == LOADS_BEFORE_THE_GATE
    status, rest = whole_run(node, *words)
    assert (status, rest["copied"], rest["there_already"]) == (0, OBJECTS - LOADS_BEFORE_THE_GATE, 20)
    assert objects(tmp_path / "a") == objects(tmp_path / "b")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_warm_ends_after_its_batch_and_a_second_run_loads_the_rest(
    node: Node, gated: Path, config: Path, tmp_path: Path, number: int
) -> None:
    keys = filled(node, tmp_path)
    server = node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "a"))
    words = ("warm", "--tier", "disk", "--config", str(config), "--json")
    # The command itself reads one object of the namespace, for its layout; the server loads.
    status, figures = interrupted_at_the_gate(node, gated, 1, number, *words)
    assert (status, figures["interrupted"]) == (130, True)
    status, rest = whole_run(node, *words)
    assert (status, rest["loaded"] + rest["there_already"]) == (0, OBJECTS)
    assert rest["there_already"] == figures["loaded"]
    assert node.client().lookup(keys, namespace=node.namespace, tiers=[]).hits == OBJECTS
    assert server.popen.poll() is None


def test_a_second_signal_ends_a_command_whose_medium_hangs(
    node: Node, gated: Path, config: Path, tmp_path: Path
) -> None:
    filled(node, tmp_path)
    process = begin(node, gated, LOADS_BEFORE_THE_GATE, "verify", "--tier", "disk", "--config", str(config))
    try:
        until(lambda: (gated / "reached").exists() or process.poll() is not None, "the gate")
        # The first is noted, and the command goes on waiting for its medium; the gate stays shut.
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert process.poll() not in (None, 0)
    finally:
        process.kill()
        process.communicate()
