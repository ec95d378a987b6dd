"""`lmcache-core bench peer-tier`, reduced: its records, each beside a bare socket or Redis of the same run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core.native import native

TIMEOUT_S = 300  # a safety net


@pytest.mark.skipif(native is None, reason="a peer's digest is made in C")
def test_every_size_stands_beside_a_bare_socket_and_redis(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_peer")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    command = [sys.executable, "-m", "lmcache_core.cli.main", "bench", "peer-tier", "--quick", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    records = {each["name"]: each for each in json.loads(done.stdout)["results"]}
    sizes = ("64 KiB", "1 MiB", "8 MiB")
    loads = {f"load {size}{beside}" for size in sizes for beside in ("", " beside Redis")}
    cpu = {f"CPU of the {end}, {size}" for end in ("reader", "owner") for size in sizes}
    pings = {f"noop {which} at the {end} during pulls" for which in ("p50", "p99") for end in ("owner", "reader")}
    assert set(records) == loads | cpu | pings | {"pulled meanwhile"}
    assert all(record["value"] > 0 for record in records.values())
    assert all(record["floor"] > 0 for name, record in records.items() if name != "pulled meanwhile")
    assert {name: each["target"] for name, each in records.items() if each["target"] is not None} == {
        **{f"load {size}": 0.8 for size in sizes},
        **{f"noop p99 at the {end} during pulls": 2.0 for end in ("owner", "reader")},
    }
