"""The log as lines of JSON: each is an object, whatever was logged."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from lmcache_core.observe.lines import JsonLines
from lmcache_core.observe.logs import LogEvents, LogSettings
from lmcache_core.observe.subscriber import SubscriberContext
from lmcache_testing.subscriber import samples


def test_what_ends_lines_or_turns_a_terminal_is_escaped_and_other_scripts_are_not() -> None:
    text = "größer\u2028{}\u0085\x9b2J\u202e 漢"
    line = JsonLines().format(logging.LogRecord("x", logging.INFO, "", 0, text, None, None))
    assert line.isprintable()
    assert "größer" in line
    assert "漢" in line
    assert json.loads(line)["message"] == text


def test_every_line_is_an_object(tmp_path: Path) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("lmcache_core")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.DEBUG)
    try:
        log.warning("two\nlines and %s", "a “quote”")
        try:
            raise ValueError("no")
        except ValueError:
            log.exception("it failed")
        LogEvents(LogSettings(objects=True), SubscriberContext("node", tmp_path)).hear(samples())
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[0]["message"] == "two\nlines and a “quote”"
    assert lines[0]["time"].endswith("+00:00")
    assert "ValueError: no" in lines[1]["exception"]
    assert [line["event"]["event"] for line in lines[2:]] == [event.name for event in samples()]
    assert lines[2]["event"]["keys"] == 8


STRANGER = """
import os, socket
os.setgroups([])
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
    sock.connect("lifeline")  # here, so that no folder above is in the way
    assert b"uid 65534" in sock.recv(65536)
"""


def test_a_server_logs_in_lines_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CORE_NONSENSE", "1")
    command = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--log-format", "json", "--name"]
    name = f"json-{uuid4().hex[:8]}"
    command += [name, "--runtime_dir", str(tmp_path / "run")]
    command += ["--state_dir", str(tmp_path / "state"), "--l1.size_bytes", "16MiB", "--l1.backing", "memfd"]
    command += ["--subscribers.log.level", "info"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    server.stdout.readline()
    strange = os.geteuid() == 0  # only root can be somebody else
    if strange:
        folder = tmp_path / "run" / name
        folder.chmod(0o711)
        (folder / "lifeline").chmod(0o777)
        for _ in range(2):
            subprocess.run([sys.executable, "-c", STRANGER], cwd=folder, check=True)
    server.terminate()
    _, said = server.communicate(timeout=60)
    lines = [json.loads(line) for line in said.splitlines()]
    assert server.returncode == 0
    assert any("LMCACHE_CORE_NONSENSE is not a setting" in line["message"] for line in lines)
    assert any("drains" in line["message"] for line in lines)
    named = [line["event"]["event"] for line in lines if "event" in line]
    # It may end before it is populated; the extension is not everywhere.
    others = {*named} - {"populated", "peer_refused", "no_c_extension"}
    assert others == {"serving", "draining", "drain", "ending"}
    assert ("peer_refused" in named) == strange
