"""Commands as a user runs them: what they print, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lmcache_core
from lmcache_core.cli import check, clean
from lmcache_core.cli.lazy import add_command
from lmcache_core.cli.main import ELSEWHERE, build_parser
from lmcache_core.errors import PluginError
from lmcache_core.native import native
from lmcache_core.plugins.hookspecs import hookimpl
from lmcache_core.plugins.records import Refusal
from lmcache_core.plugins.registry import Registry
from lmcache_core.plugins.suggest import install_command
from lmcache_core.pool.backing import segment_path
from lmcache_core.settings.compose import make_settings

Run = Callable[..., subprocess.CompletedProcess[str]]
ACME = ["--l2.cold.type", "acme", "--l2.cold.bucket", "b"]
POOL = ["--l1.size_bytes", "4MiB"]


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The refusal: exit status 2, one line on standard error, nothing on standard output."""
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("lmcache-core: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_version_prints_the_version_of_the_package(run: Run) -> None:
    assert run("--version").stdout == f"lmcache-core {lmcache_core.__version__}\n"


def test_bare_help_names_every_command_and_those_of_plugins(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("serve", "status", "bench", "plugins", "config", "check", "clean", "acme-hello"):
        assert f"\n    {command}" in done.stdout


def test_bare_help_imports_nothing_heavy(environ: dict[str, str], tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from lmcache_core.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'pydantic', 'zmq', 'msgspec', 'numpy', 'rich', 'transformers'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    environ = {name: value for name, value in environ.items() if name != "LMCACHE_CORE_PLUGINS"}  # all that there are
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_asking_a_server_reads_no_settings_where_there_is_no_file(environ: dict[str, str], tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from lmcache_core.cli.main import main\n"
        "main(['status', '--name', 'nobody'])\n"
        "print('READERS', sorted({'pydantic', 'pydantic_settings'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "READERS []"


def test_a_command_that_asks_a_server_finds_it_as_serve_does(run: Run, tmp_path: Path) -> None:
    (tmp_path / "server.env").write_text("LMCACHE_CORE_NAME=of-the-env-file\n")
    (tmp_path / "lmcache.yaml").write_text("name: of-the-file\n")
    assert "/of-the-file/" in run("status", "--config", "lmcache.yaml").stderr
    assert "/of-the-env-file/" in run("status", "--config", "lmcache.yaml", "--env-file", "server.env").stderr
    assert "/of-the-env-file/" in run("status", env={"LMCACHE_CORE_ENV_FILE": "server.env"}).stderr
    assert (
        "/of-the-variable/"
        in run("status", "--env-file", "server.env", env={"LMCACHE_CORE_NAME": "of-the-variable"}).stderr
    )
    assert "absent.env cannot be read" in run("status", "--name", "a", "--env-file", "absent.env").stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "command is missing: serve, status, explain, "),
        ("tiers", "action is missing: list, add, reconfigure, drain, remove: see lmcache-core tiers --help"),
        ("statsu", "there is no command 'statsu': did you mean 'status'?"),
        ("tiers lst", "there is no action 'lst': did you mean 'list'?"),
        ("zzz", "there is no command 'zzz': see lmcache-core --help"),
    ],
)
def test_a_missing_or_misspelt_command_is_refused_with_what_there_is(run: Run, line: str, said: str) -> None:
    done = run(*line.split())
    assert done.returncode == 2
    assert said in done.stderr
    assert "choose from" not in done.stderr


def test_help_is_a_command_too_and_the_package_runs_as_a_module(run: Run, environ: dict[str, str]) -> None:
    assert run("help").stdout == run("--help").stdout
    assert run("help", "tiers", "add").stdout == run("tiers", "add", "--help").stdout
    words = [sys.executable, "-m", "lmcache_core", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, env=environ, check=True)
    assert done.stdout == run("--version").stdout


def test_a_plugin_s_command_runs_and_gives_its_exit_status(run: Run) -> None:
    done = run("acme-hello", "--to", "all")
    assert (done.returncode, done.stdout) == (7, "hello all\n")


def test_a_plugin_cannot_take_the_name_of_a_command() -> None:
    class Greedy:
        @hookimpl
        def lmcache_add_commands(self, subparsers: Any) -> None:
            subparsers.add_parser("serve")

    registry = Registry()
    registry.register(Greedy(), "greedy")
    parser = build_parser(registry)
    assert "serve" in str(registry.faults[0])
    assert parser.parse_known_args(["serve"])[0].takes_settings


def with_command(name: str) -> Registry:
    """A plugin that adds this command, whose module is `clean`'s."""

    class Acme:
        @hookimpl
        def lmcache_add_commands(self, subparsers: Any) -> None:
            add_command(subparsers, name, "what Acme adds", clean.__name__)

    registry = Registry()
    registry.register(Acme(), "acme")
    return registry


def test_a_plugin_adds_a_command_below_plugins() -> None:
    registry = with_command("plugins acme")
    parser = build_parser(registry)
    assert registry.faults == []
    arguments, rest = parser.parse_known_args(["plugins", "acme", "--nothing"])
    assert rest == ["--nothing"]
    assert arguments.command_parser.prog == "lmcache-core plugins acme"
    assert "what Acme adds" in parser.parse_known_args(["plugins"])[0].command_parser.format_help()


@pytest.mark.parametrize("name", ["plugins show", "tiers acme", "nothing acme"])
def test_a_command_that_cannot_be_added_is_a_fault_of_its_plugin(name: str) -> None:
    registry = with_command(name)
    parser = build_parser(registry)
    assert name.split()[-1] in str(registry.faults[0])
    shown = parser.parse_known_args(["plugins", "show", "acme"])[0]
    assert shown.command_parser.description != "what Acme adds"
    assert shown.name == "acme"


def test_the_kit_without_its_package_says_what_to_install() -> None:
    parser = build_parser(Registry())
    arguments, _ = parser.parse_known_args(["plugins", "certify", "cold", "--kit=quick", "--json"])
    with pytest.raises(PluginError, match="'plugins certify' comes with lmcache-testing: pip install "):
        arguments.run(arguments)
    assert "certify" not in parser.parse_known_args(["plugins"])[0].command_parser.format_help()


def test_a_reader_that_goes_away_is_no_traceback(environ: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmcache_core.cli.main", "config"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, env=environ, cwd=tmp_path, check=False)
    finally:
        os.close(write_end)
    assert done.stderr == b""


@pytest.mark.parametrize(("name", "requirement"), ELSEWHERE.items(), ids=ELSEWHERE)
def test_a_command_without_its_package_says_what_to_install(name: str, requirement: str) -> None:
    parser = build_parser(Registry())
    arguments, _ = parser.parse_known_args([*name.split(), "--json"])
    with pytest.raises(PluginError, match=re.escape(f": {install_command(requirement)}")):
        arguments.run(arguments)
    assert f"\n    {name}" not in parser.format_help()


def test_bench_without_any_says_what_to_install() -> None:
    arguments, _ = build_parser(Registry()).parse_known_args(["bench"])
    with pytest.raises(PluginError, match="pip install lmcache-bench"):
        arguments.run(arguments)


def test_demo_whose_package_was_refused_says_why() -> None:
    registry = Registry()
    registry.refuse(Refusal("transformers", "LMCache_Transformers", "0.1", "it failed to load"))
    arguments, _ = build_parser(registry).parse_known_args(["demo"])
    with pytest.raises(PluginError, match="it failed to load"):
        arguments.run(arguments)


@pytest.mark.parametrize("command", ["status", "explain", "tiers list", "tiers drain"])
def test_every_command_that_asks_a_server_can_be_told_whose_it_is(run: Run, command: str) -> None:
    assert "--server-uid UID" in run(*command.split(), "--help").stdout


@pytest.mark.parametrize("command", ["status", "quota set team", "tiers drain cold", "plugins show x"])
def test_an_unknown_option_is_refused_where_no_settings_are_taken(run: Run, command: str) -> None:
    done = run(*command.split(), "--l1.size_bytes", "1")
    assert done.returncode == 2
    named = " ".join(command.split()[: 1 if command == "status" else 2])
    assert "unrecognized arguments: --l1.size_bytes 1: " in done.stderr
    assert f" see lmcache-core {named} --help" in done.stderr


@pytest.mark.parametrize("line", ["status --jsn", "explain --jsn=x", "plugins show --jsn"])
def test_a_misspelt_option_is_suggested_before_what_is_missing_is_told(run: Run, line: str) -> None:
    done = run(*line.split())
    assert done.returncode == 2
    assert "there is no option --jsn: did you mean '--json'?" in done.stderr


@pytest.mark.parametrize("command", ["serve", "config"])
def test_a_misspelt_setting_is_one_line_and_status_two(run: Run, command: str) -> None:
    assert "did you mean '--l1.size_bytes'?" in one_line(run(command, "--l1.size_byte", "1"))


# --- config -------------------------------------------------------------------------------------------------


def test_config_shows_values_with_their_origin_and_hides_secrets(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lmcache.toml").write_text('chunk_tokens = 512\n[l2.cold]\ntype = "acme"\nbucket = "b"\n')
    env = {"LMCACHE_CORE_L2__COLD__TOKEN": "hunter2", "LMCACHE_CORE_NONSENSE": "1"}
    done = run("config", "--json", "--l1.size_bytes=8GiB", env=env)
    shown = json.loads(done.stdout)
    assert shown["l1.size_bytes"] == {"value": 8 << 30, "origin": "flag", "where": "--l1.size_bytes"}
    assert shown["chunk_tokens"] == {"value": 512, "origin": "file", "where": "lmcache.toml"}
    assert shown["l1.backing"]["origin"] == "default"
    assert shown["l2.cold.token"] == {
        "value": "**********",
        "origin": "environment",
        "where": "LMCACHE_CORE_L2__COLD__TOKEN",
    }
    assert "warning: LMCACHE_CORE_NONSENSE" in done.stderr
    table = run("config", "--l1.size_bytes=8GiB", env=env).stdout
    assert "hunter2" not in table + done.stdout
    line = next(line for line in table.splitlines() if line.startswith("l1.size_bytes"))
    assert line.split() == ["l1.size_bytes", "8GiB", "flag", "--l1.size_bytes"]


def test_the_file_can_be_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("chunk_tokens = 64\n")
    shown = json.loads(run("config", "--json", "--config", "other.toml").stdout)
    assert shown["chunk_tokens"]["value"] == 64
    assert "cannot be read" in one_line(run("config", "--config", "absent.toml"))


def test_help_shows_every_option_of_the_configured_tiers(run: Run) -> None:
    bare, with_tier = run("serve", "--help"), run("serve", *ACME, "--help")
    assert bare.returncode == with_tier.returncode == 0
    assert "--l1.size_bytes" in bare.stdout
    assert "no tier is configured" in bare.stdout
    for option in ("--l2.cold.bucket", "--l2.cold.token <secret|none>", "--l2.cold.capacity_bytes", "where objects go"):
        assert option in with_tier.stdout


# --- plugins ------------------------------------------------------------------------------------------------


def test_plugins_lists_versions_components_capabilities_and_refusals(run: Run) -> None:
    listed = json.loads(run("plugins", "--json").stdout)
    acme = next(plugin for plugin in listed["plugins"] if plugin["name"] == "acme")
    assert (acme["distribution"], acme["version"], acme["summary"]) == ("lmcache-acme", "1.5", "objects on Acme")
    adapter, serde = acme["components"]
    assert (adapter["kind"], adapter["name"]) == ("l2_adapter", "acme")
    assert adapter["capabilities"]["ttl"] is True
    assert adapter["capabilities"]["scan"] is False
    assert serde["name"] == "no_library"
    refused = {each["name"]: each for each in listed["refused"]}
    assert "a_library_that_is_not_there" in refused["broken"]["why"]
    for words in (["plugins", "list", "--json"], ["plugins", "--json", "list"]):
        again = json.loads(run(*words).stdout)["plugins"]
        assert [each["name"] for each in again] == [each["name"] for each in listed["plugins"]]
    table = run("plugins").stdout
    for word in ("lmcache-acme", "1.5", "l2 adapter", "thread_safe", "a_library_that_is_not_there"):
        assert word in table


def test_plugins_show_prints_the_settings_of_a_component(run: Run) -> None:
    shown = json.loads(run("plugins", "show", "acme", "--json").stdout)
    settings = {setting["name"]: setting for setting in shown["components"][0]["settings"]}
    assert settings["bucket"]["required"] is True
    assert settings["token"]["type"] == "secret|none"
    assert "where objects go" in run("plugins", "show", "acme").stdout


def test_plugins_show_of_a_refused_or_unknown_name_says_why(run: Run) -> None:
    assert "a_library_that_is_not_there" in one_line(run("plugins", "show", "broken"))
    assert "did you mean 'acme'?" in one_line(run("plugins", "show", "acne"))
    assert "plugins show NAME" in one_line(run("plugins", "show"))


# --- check --------------------------------------------------------------------------------------------------


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    return {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_check_runs_the_checks_of_plugins_in_use(run: Run) -> None:
    done = run("check", "--json", *POOL, *ACME)
    assert done.returncode == 0
    assert findings(done)["bucket"]["ok"] is True
    assert "bucket" not in findings(run("check", "--json", *POOL))


def test_check_says_what_the_missing_extension_costs_and_calls_it_no_failure(run: Run) -> None:
    done = run("check", "--json", *POOL, env={"LMCACHE_CORE_NATIVE": "off"})
    found = findings(done)["C extension"]
    assert (done.returncode, found["ok"], found["cure"]) == (0, True, "unset LMCACHE_CORE_NATIVE")
    for cost in ("LMCACHE_CORE_NATIVE is off", "ask the server for each hit", "restarts are cold", "slower"):
        assert cost in str(found["message"])


def test_a_server_without_the_extension_says_at_its_start_what_that_costs_and_how_to_have_it(
    environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "hidden").mkdir()
    hide = "import sys\nsys.modules['lmcache_core._native'] = None\n"  # as where no C compiler was
    (tmp_path / "hidden" / "sitecustomize.py").write_text(hide)
    for mode, level, cure in (
        ("auto", "WARNING", "install lmcache-core again where gcc and Python.h are"),
        ("off", "INFO", "unset LMCACHE_CORE_NATIVE"),
    ):
        said = _said_until_ready(environ | {"LMCACHE_CORE_NATIVE": mode, "PYTHONPATH": "hidden"}, tmp_path)
        (line,) = [line for line in said if "C extension" in line]
        assert f" {level} " in line
        for words in ("ask the server for each hit", "restarts are cold", cure):
            assert words in line


def _said_until_ready(environ: dict[str, str], folder: Path) -> list[str]:
    """What a server says on standard error by the time it is ready."""
    options = ["--name", "bare", "--runtime_dir", str(folder / "run"), "--l1.backing", "memfd", *POOL]
    command = [sys.executable, "-m", "lmcache_core.cli.main", "serve", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=folder
    ) as server:
        assert server.stdout is not None
        ready = server.stdout.readline()
        server.terminate()
        _, said = server.communicate(timeout=60)
        assert "ready" in ready, said
        return said.splitlines()


@pytest.mark.skipif(native is None, reason="the C extension is not there")
def test_check_says_that_the_extension_is_in_use(run: Run) -> None:
    assert str(findings(run("check", "--json", *POOL))["C extension"]["message"]).startswith("in use")


def test_check_tells_what_is_wrong_with_its_cure(run: Run) -> None:
    done = run("check", "--json", *POOL, *ACME, env={"ACME": "down"})
    assert done.returncode == 1
    assert findings(done)["bucket"] == {
        "ok": False,
        "subject": "bucket",
        "message": "cannot be reached",
        "cure": "plug it in",
    }
    assert "NOT OK" in run("check", *POOL, *ACME, env={"ACME": "down"}).stdout


def test_check_asks_each_tiers_adapter_for_its_medium(run: Run) -> None:
    well = findings(run("check", "--json", *POOL, *ACME))["tier 'cold' (b)"]
    assert (well["ok"], well["message"]) == (True, "it answers")
    gone = findings(run("check", "--json", *POOL, *ACME[:-1], "gone"))["tier 'cold' (gone)"]
    assert (gone["ok"], gone["message"], gone["cure"]) == (False, "there is no such bucket", "create it")


def test_check_survives_a_check_that_raises(run: Run) -> None:
    done = run("check", "--json", *POOL, *ACME, env={"ACME": "raises"})
    assert done.returncode == 1
    assert "the check fell over" in str(findings(done)["plugin acme"])


def test_check_of_an_engine_asks_its_connector_alone(run: Run) -> None:
    said = findings(run("check", "--json", "--engine", "acme", "--l1.size_bytes", "9999TiB"))
    assert said["bucket"]["ok"] is True
    assert "l1" not in said  # a server runs already
    done = run("check", "--json", "--engine", "nobody")
    assert done.returncode == 1
    assert "vllm is the engine whose connector has a check" in str(findings(done)["engine nobody"]["cure"])


def test_check_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    class Hangs:
        @hookimpl
        def lmcache_check(self) -> None:
            release.wait()

    registry = Registry()
    record = registry.register(Hangs(), "hangs")
    monkeypatch.setattr(check, "CHECK_S", 0.05)
    try:
        (finding,) = check.findings_of(registry, record, make_settings())
    finally:
        release.set()
    assert not finding.ok
    assert "did not finish" in finding.message


@pytest.mark.parametrize(
    ("flags", "subject"),
    [
        (["--l1.watermark", "9"], "settings"),
        (["--l1.size_bytes", "9999TiB"], "l1"),
        ([*POOL, *ACME, "--state_dir", "/dev/null/state"], "state_dir"),
        ([*POOL, *ACME, "--l2.cold.serde", "no_library"], "serde no_library"),
        ([*POOL, "--l2.cold.type", "broken"], "settings"),
    ],
)
def test_check_finds_what_would_stop_a_server(run: Run, flags: list[str], subject: str) -> None:
    done = run("check", "--json", *flags)
    assert done.returncode == 1
    assert findings(done)[subject]["ok"] is False


# --- serve, status, clean -----------------------------------------------------------------------------------


def test_serve_says_when_it_is_ready_answers_status_and_ends_on_sigterm(
    run: Run, environ: dict[str, str], tmp_path: Path
) -> None:
    name = f"cli-{tmp_path.name[-24:].lower()}"
    command = [sys.executable, "-m", "lmcache_core.cli.main", "serve", *POOL, "--name", name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=tmp_path
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            ready = server.stdout.readline()
            assert ready.startswith(f"lmcache-core {name} ready at ")
            status = json.loads(run("status", "--name", name, "--json").stdout)
            assert status["server"]["pid"] == server.pid
            table = run("status", "--all", env={"LMCACHE_CORE_NAME": name}).stdout.splitlines()
            assert ["server.name", name] in [line.split() for line in table]
            (tmp_path / "lmcache.toml").write_text(f'name = "{name}"\n')
            short = run("status").stdout.splitlines()
            assert len(short) <= 10
            assert short[0].split()[:3] == ["server", f"{name},", "serving"]
            assert short[-1].split() == ["trouble", "none"]
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            logged = server.stderr.read()
            assert "plugin not in use: broken (lmcache-broken 1.5)" in logged
            for word in (
                f"'{name}' serves a pool of 4,194,304 bytes",
                f"'{name}' is shutting down",
                f"'{name}' closes; its pool is freed (l1.keep_pool, or serve --keep-pool, keeps it)",
            ):
                assert word in logged
        finally:
            if server.poll() is None:
                server.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_ended_as_it_starts_leaves_nothing(
    environ: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    name = f"start-{tmp_path.name[-24:].lower()}"
    command = [sys.executable, "-m", "lmcache_core.cli.main", "serve", *POOL, "--name", name]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environ, cwd=tmp_path) as server:
        try:
            while not segment_path(name).exists():  # one of the first things that it makes
                assert server.poll() is None
            server.send_signal(number)
            assert server.wait(60) == 0
            assert not segment_path(name).exists()
            assert not list(tmp_path.rglob("lifeline"))
        finally:
            if server.poll() is None:
                server.kill()
            segment_path(name).unlink(missing_ok=True)


def test_a_variable_with_one_underscore_too_few_is_refused_by_its_right_name(run: Run) -> None:
    refusal = one_line(run("config", env={"LMCACHE_CORE_L1_SIZE_BYTES": "1GiB"}))
    assert "write LMCACHE_CORE_L1__SIZE_BYTES" in refusal


def test_status_without_a_server_is_one_line(run: Run) -> None:
    assert "no server" in one_line(run("status", "--name", "nobody"))


def test_clean_finds_nothing_where_nothing_is_left(run: Run) -> None:
    done = run("clean", "no-such-pool-anywhere")
    assert (done.returncode, done.stdout) == (0, "nothing to clean\n")
    assert json.loads(run("clean", "no-such-pool-anywhere", "--json").stdout) == []


def test_clean_takes_names_as_other_commands_do(run: Run) -> None:
    assert run("clean", "--name", "no-such-pool-anywhere").stdout == "nothing to clean\n"
    assert "pool name" in one_line(run("clean", "one", "--name", "No/Name"))
