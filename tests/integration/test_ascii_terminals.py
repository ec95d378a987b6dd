"""Every command prints on a terminal that knows nothing but ASCII, whatever names the server has been given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core import Layout, Namespace, Server, make_settings

NAMESPACE = Namespace("größe-模型", Layout("uint8", (4096,)))

# One process for all of them: in each one the start costs more than the command.
EVERY_COMMAND = """
import sys, traceback

from lmcache_core.cli.main import COMMANDS, ELSEWHERE, main

name, folder = sys.argv[1:]
where = [f"--name={name}", f"--runtime_dir={folder}/run"]
lines = [[]] + [["--help"]] + [[*each.split(), "--help"] for each in (*COMMANDS, *ELSEWHERE)]
lines += [["tiers", each, "--help"] for each in ("list", "add", "drain", "remove", "reconfigure")]
lines += [["quota", each, "--help"] for each in ("list", "set", "delete")]
lines += [["plugins"], ["plugins", "show", "mock"], ["config"], ["check"], ["completion", "bash"], ["nonsense-\\u6a21"]]
for each in (["status"], ["metrics"], ["tiers", "list"], ["quota", "list"], ["explain", "\\u6a21"]):
    lines += [[*each, *where], [*each, "--json", *where]]
failed = []
for line in lines:
    try:
        main(line)
    except SystemExit:
        pass
    except BaseException:
        failed.append((line, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
for line, why in failed:
    sys.__stderr__.write(ascii(line) + ascii(why) + "\\n")
print("ran", len(lines), "failed", len(failed))
"""


@pytest.mark.parametrize("encoding", ["ascii", ""], ids=["PYTHONIOENCODING=ascii", "LC_ALL=C"])
def test_every_command_prints_on_a_terminal_of_ascii(tmp_path: Path, encoding: str) -> None:
    settings = make_settings(
        name="ascii", l1={"size_bytes": "16MiB", "backing": "memfd"}, l2={"mem": {"type": "mock"}},
        runtime_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "größe"),
    )  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    environ |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "80"}
    environ |= {"PYTHONIOENCODING": encoding} if encoding else {}
    with Server(settings) as server, server.connect("größe-模型") as client:
        client.store([b"k" * 32], [bytes(4096)], namespace=NAMESPACE)
        done = subprocess.run(
            [sys.executable, "-c", EVERY_COMMAND, "ascii", str(tmp_path)], env=environ, capture_output=True, timeout=240
        )
    told = done.stdout.decode("ascii") + done.stderr.decode("ascii")
    assert done.returncode == 0, told
    assert "Traceback" not in told, told
    assert "UnicodeEncodeError" not in told, told
    assert " failed 0" in told, told
