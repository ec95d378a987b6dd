"""Completion, in the shells themselves: what the Tab key does in bash and zsh, and what fish lists."""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_core.cli.main import main
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import embedded_server

SPACE = Namespace("m", Layout("uint8", (4096,)), label="llama-3-8b/bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a command `lmcache-core`, the scripts, and files."""
    made = tmp_path_factory.mktemp("completed")
    command = made / "lmcache-core"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lmcache_core "$@"\n')
    command.chmod(0o755)
    (made / "settings.toml").write_text("")
    (made / "recordings").mkdir()
    done = subprocess.run([command, "completion", "fish"], capture_output=True, text=True, check=True)
    (made / "script.fish").write_text(done.stdout)
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    l1, l2 = {"size_bytes": 8 << 20, "backing": "memfd"}, {"coldest": {"type": "mock"}}
    with embedded_server(tmp_path_factory.mktemp("served"), l1=l1, l2=l2) as made, made.connect() as client:
        client.register_layout(SPACE)
        client.quota_set("team-a", {"l1": {"limit_bytes": 1 << 20}}, [SPACE.id])
        yield made


def environment(folder: Path) -> dict[str, str]:
    left_out = ("COLUMNS", "LINES", "PS1", "PROMPT_COMMAND", "EDITOR", "VISUAL")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return kept | {"PATH": f"{folder}:{os.environ['PATH']}", "TERM": "xterm", "HOME": str(folder), "LC_ALL": "C.UTF-8"}


Completed = Callable[[str], str]

SETUP = {
    "bash": "source <(lmcache-core completion bash)",
    "zsh": 'autoload -Uz compinit && compinit -u -D; eval "$(lmcache-core completion zsh)"',
}
QUIET = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


class Typist:
    """Somebody at a terminal, who types a line and the Tab key, and has the shell print what became of the line."""

    def __init__(self, shell: str, folder: Path) -> None:
        self.terminal, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 1000, 0, 0))  # a line never wraps
        self._shell = subprocess.Popen(
            ["setsid", "--ctty", *QUIET[shell]],
            cwd=folder, env=environment(folder), stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        self("true; " + SETUP[shell], tab=False)

    def __call__(self, line: str, *, tab: bool = True) -> str:
        end = "\t\x01echo RE''AD \n" if tab else "; echo RE''AD\n"  # Ctrl-A: to the beginning of the line
        os.write(self.terminal, (line + end).encode())
        shown = b""
        while (found := re.search(rb"READ(.*)\r\n", shown)) is None:
            assert select.select([self.terminal], [], [], 60)[0], shown
            shown += os.read(self.terminal, 1 << 16)
        return found[1].decode()

    def close(self) -> None:
        os.close(self.terminal)  # the shell is hung up
        self._shell.wait()


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def completed(request: pytest.FixtureRequest, folder: Path) -> Iterator[Completed]:
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    if shell == "fish":
        yield lambda line: in_fish(line, folder)
        return
    typist = Typist(shell, folder)
    yield typist
    typist.close()


def in_fish(line: str, folder: Path) -> str:
    code = f"source {folder}/script.fish; complete -C {line!r}"
    return subprocess.run(
        ["fish", "--no-config", "-c", code],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lmcache-core expl", "explain"),
        ("lmcache-core tiers rec", "reconfigure"),
        ("lmcache-core serve --l1.size", "--l1.size_bytes"),
        ("lmcache-core serve --l1.eviction n", "noop"),
        ("lmcache-core serve --config set", "settings.toml"),
        ("lmcache-core trace info rec", "recordings"),
        ("lmcache-core plugins show built", "builtin"),
        ("lmcache-core completion f", "fish"),
        ("lmcache-core simulate --policy s3", "s3fifo"),
    ],
)
def test_a_word_is_completed(completed: Completed, line: str, expected: str) -> None:
    assert expected in completed(line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tiers {where} drain cold", "coldest"),
        ("explain {where} --namespace " + f"{SPACE.id:016x}"[:4], f"{SPACE.id:016x}"),
        ("quota {where} delete te", "team-a"),
        ("quota {where} set x --store cold", "coldest"),
    ],
)
def test_what_the_server_has_is_completed(completed: Completed, server: Server, line: str, expected: str) -> None:
    action, _, rest = line.partition(" {where} ")
    settings = server.parts.settings
    words = rest.split(" ")
    where = f"--name {settings.name} --runtime-dir {settings.runtime_dir}"
    last = f"{where} {words[-2]} {words[-1]}" if words[-2].startswith("--") else f"{where} {words[-1]}"
    first = words[: -2 if words[-2].startswith("--") else -1]
    line = " ".join(["lmcache-core", action, *first, last])
    assert expected in completed(line)


def test_no_server_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "values", "tiers", "drain", "--runtime-dir", str(tmp_path)]) == 0
    assert main(["completion", "values", "tiers", "drain", "--runtime-dir"]) == 0
    assert main(["completion", "values", "nonsense"]) == 0
    assert capsys.readouterr().out == ""


def test_values_come_with_what_they_are(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    settings = server.parts.settings
    where = ["--name", settings.name, "--runtime-dir", str(settings.runtime_dir)]
    assert main(["completion", "values", "namespaces", "explain", *where]) == 0
    assert capsys.readouterr().out == f"{SPACE.id:016x}\tllama-3-8b/bf16\n"
    assert main(["completion", "values", "policies"]) == 0
    assert "lru\tleast recently used goes first" in capsys.readouterr().out


def test_the_manual_page_has_the_commands_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "man"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(".TH LMCACHE")
    for words in ("lmcache-core explain'", "l1.size_bytes", "run a server", "namespaces"):
        assert words.replace("-", "\\-") in page
    if groff := shutil.which("groff"):
        shown = subprocess.run(
            [groff, "-Kutf8", "-man", "-Tutf8"], input=page, capture_output=True, text=True, check=True
        ).stdout
        assert "run a server" in shown


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "completion.bash"
    assert main(["completion", "bash"]) == 0
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        line = " ".join(words)
        code = (
            f"source {script}; COMP_WORDS=({line.strip()}{' ' + repr('') if line.endswith(' ') else ''}); "
            f"COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; "
            "found=$(complete -p lmcache-core | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $found; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert "explain" in completed("lmcache-core", "ex")
    assert "reconfigure" in completed("lmcache-core", "tiers", "rec")
    assert "--l1.size_bytes" in completed("lmcache-core", "serve", "--l1.si")
    assert "--json" in completed("lmcache-core", "status", "--js")
