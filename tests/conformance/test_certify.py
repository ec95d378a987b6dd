"""`lmcache-core plugins certify`: the kit from the installed package, over a tier that settings describe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_core.errors import UsageError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.tiers.contract import StoreItem
from lmcache_core.tiers.tier.parallel import adapter_context
from lmcache_testing.certified import Described

HERE = Path(__file__).parent


def certify(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lmcache_core.cli.main", "plugins", "certify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_a_tier_that_holds_what_it_claims_gets_its_card(tmp_path: Path) -> None:
    (tmp_path / "lmcache.toml").write_text(f'[l2.cold]\ntype = "fs"\npath = "{tmp_path}/tier"\n')
    done = certify(tmp_path, "cold", "--kit=quick", "--card=card.json", "--json")
    assert done.returncode == 0, done.stderr
    card, printed = json.loads((tmp_path / "card.json").read_text()), json.loads(done.stdout)
    assert card["claims"] == printed["claims"]
    assert (card["schemaVersion"], card["color"]) == (1, "brightgreen")
    verdicts = {claim["claim"]: claim["verdict"] for claim in card["claims"]}
    assert verdicts["a scan sees exactly what is there"] == "held"
    assert verdicts["a torn object is never called whole"] == "not judged"
    assert verdicts["what expired is a miss"] == "not claimed"
    assert {claim["subject"] for claim in card["claims"]} == {"cold"}
    assert not list((tmp_path / "tier/objects").rglob("*.obj")), "the medium is empty again"


def test_a_claim_that_does_not_hold_is_a_failure_in_words(tmp_path: Path) -> None:
    wrong = f"{HERE / 'wrong_adapters.py'}::TestSaysDoneForAShortWrite::test_what_was_stored_is_read_back"
    done = certify(tmp_path, "wrong", "--tests", wrong, "--kit=quick")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED        what was stored is read back: after a store of" in done.stdout


def test_a_medium_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    described = Described(load_plugins(), "tier", {"type": "fs", "path": str(tmp_path)}, {}, None)
    with described.build("", adapter_context("kit", 1)) as adapter:
        adapter.store([StoreItem(b"key", [memoryview(b"somebody's")])], float("inf"))
    with pytest.raises(UsageError, match=r"holds objects.*\{fresh\}"):
        described.expect_empty(adapter_context("kit", 1))
    Described(load_plugins(), "tier", {"type": "fs"}, {"path": "{fresh}"}, None).expect_empty(adapter_context("kit", 1))


def test_what_cannot_be_certified_is_said(tmp_path: Path) -> None:
    for arguments, words in (
        ([], "say what to certify"),
        (["nothing"], "neither a tier of the settings nor a type"),
        (["fs", "--set", "path"], "write SETTING=VALUE"),
        (["fs"], "l2.certified.path is missing: give settings by --set SETTING=VALUE, without l2.TIER"),
        (["fs", "--set", "path={fresh}", "--through", "port"], "that setting is not given"),
    ):
        done = certify(tmp_path, *arguments)
        assert done.returncode != 0, arguments
        assert words in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("value", "host", "port", "moved"),
    [
        ("6379", "127.0.0.1", 6379, 7),
        ("box:6379", "box", 6379, "127.0.0.1:7"),
        ("http://user:word@box:9000/path", "box", 9000, "http://user:word@127.0.0.1:7/path"),
    ],
)
def test_a_proxy_is_put_before_a_port_an_address_or_a_url(value: str, host: str, port: int, moved: object) -> None:
    address = Described(load_plugins(), "tier", {}, {"where": value}, "where").address()
    assert (address.host, address.port, address.written(7)) == (host, port, moved)


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(UsageError, match="does not contain a host and port"):
        Described(load_plugins(), "tier", {}, {"where": "box"}, "where").address()


# --- adapters that take more with them than their own test ----------------------------------------------------------
UNWELL = """
import ctypes, os, time
from pathlib import Path
from pydantic import BaseModel, ConfigDict, Field
from lmcache_core import ComponentSpec, Kind, hookimpl
from lmcache_mock.memory import MemoryAdapter

class UnwellSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    place: str = Field("place", description="the medium's name")
    way: str = Field("dies", description="dies, waits, or well")

MEDIA = {}

class UnwellAdapter(MemoryAdapter):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.objects = MEDIA.setdefault(settings.place, {})
        self._way = settings.way

    def store(self, items, deadline):
        if any(item.nbytes == 0 and len(item.buffers) == 2 for item in items):
            if self._way == "dies":
                ctypes.string_at(0)
            if self._way == "waits":
                Path(os.environ["UNWELL_SAYS"]).write_text(str(os.getpid()))
            while self._way == "waits":
                time.sleep(0.01)
        return super().store(items, deadline)

    def scan(self, cursor, deadline):
        while self._way == "scans for ever":
            time.sleep(0.01)
        return super().scan(cursor, deadline)

@hookimpl
def lmcache_components():
    return [ComponentSpec(Kind.L2_ADAPTER, "unwell", "unwell:UnwellAdapter", settings="unwell:UnwellSettings")]
"""


@pytest.fixture
def unwell(tmp_path: Path) -> dict[str, str]:
    """An environment in which a plugin is installed that kills its interpreter, or hangs, in a store of no bytes."""
    site = tmp_path / "site"
    about = site / "unwell-0.1.dist-info"
    about.mkdir(parents=True)
    (site / "unwell.py").write_text(UNWELL)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: unwell\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[lmcache_core]\nunwell = unwell\n")
    (tmp_path / "tmp").mkdir()
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp"), "UNWELL_SAYS": str(tmp_path / "says")}


COMMAND = [sys.executable, "-m", "lmcache_core.cli.main", "plugins", "certify"]
FRESH = ["unwell", "--set=place={fresh}", "--kit=quick"]


def test_an_adapter_that_kills_its_interpreter_fails_that_claim_and_the_others_are_tested(
    tmp_path: Path, unwell: dict[str, str]
) -> None:
    command = [*COMMAND, *FRESH, "--card=card.json"]
    done = subprocess.run(command, cwd=tmp_path, env=unwell, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    card = json.loads((tmp_path / "card.json").read_text())
    verdicts = {claim["claim"]: (claim["verdict"], claim["why"]) for claim in card["claims"]}
    assert verdicts["an empty object is an object"][0] == "FAILED"
    assert "the interpreter ended in the middle of it (SIGSEGV)" in verdicts["an empty object is an object"][1]
    assert verdicts["deletes are idempotent"] == ("held", "")
    assert verdicts["use after close raises a tier error"] == ("held", "")
    assert card["color"] == "red"
    assert "FAILED        an empty object is an object: the interpreter ended" in done.stdout
    assert not list((tmp_path / "tmp").glob("*certify*"))


def _wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def under_way(tmp_path: Path, unwell: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A certification that hangs in a store, and the process that hangs."""
    command = [*COMMAND, *FRESH, "--set=way=waits", "--card=card.json"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=unwell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    says = tmp_path / "says"
    _wait_for(lambda: says.exists() and says.read_text(), process)
    with process:
        yield process, int(says.read_text())
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_is_interrupted_leaves_no_process_no_file_and_no_card(
    tmp_path: Path, under_way: tuple[subprocess.Popen[str], int], number: int
) -> None:
    process, hangs = under_way
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert not Path(f"/proc/{hangs}").exists()
    assert not (tmp_path / "card.json").exists(), "a card of what was tested until then would be taken for a whole one"
    assert not list((tmp_path / "tmp").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"site", "tmp", "says"}


def test_one_that_is_killed_takes_the_kit_with_it(tmp_path: Path, under_way: tuple[subprocess.Popen[str], int]) -> None:
    process, hangs = under_way
    process.kill()
    process.wait(60)
    end = time.monotonic() + 60
    while Path(f"/proc/{hangs}").exists():
        assert time.monotonic() < end, "the kit goes on, and nobody waits for it"
        time.sleep(0.01)


def test_a_medium_whose_scan_does_not_come_back_is_left_in_bounded_time(tmp_path: Path, unwell: dict[str, str]) -> None:
    imports = "from lmcache_core.cli import main; from lmcache_testing import certify"
    script = f"{imports}; certify.EMPTY_S = 0.5; raise SystemExit(main.main())"
    arguments = ["plugins", "certify", "unwell", "--set=way=scans for ever", "--kit=quick"]
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=unwell, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "cannot tell whether tier 'unwell' is empty" in done.stderr
    assert "scan (unwell.py" in done.stderr


# --- where it runs --------------------------------------------------------------------------------------------------
def test_a_card_that_cannot_be_written_is_said_before_anything_is_tested(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for card, words in ((tmp_path, "this is a folder"), (tmp_path / "file/card.json", "is not writable")):
        done = certify(tmp_path, "fs", "--set", f"path={tmp_path}/{{fresh}}", "--kit=quick", f"--card={card}")
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stdout == ""


def test_it_leaves_nothing_where_it_was_called_and_asks_nobody_for_options(
    tmp_path: Path, unwell: dict[str, str]
) -> None:
    """Options and a configuration of pytest's that are meant for other tests change nothing."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (here / "conftest.py").write_text("raise SystemExit('not meant')\n")
    env = {**unwell, "PYTEST_ADDOPTS": "--no-such-option-either"}
    done = subprocess.run(
        [*COMMAND, *FRESH, "--set=way=well", "--json"],
        cwd=here,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # without a terminal
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in here.iterdir()} == {"pytest.ini", "conftest.py"}
    assert not list((tmp_path / "tmp").iterdir())
    card = json.loads(done.stdout)
    assert set(card) == {"schemaVersion", "label", "message", "color", "speed", "claims"}
    assert set(card["claims"][0]) == {"subject", "claim", "verdict", "why"}
    assert (card["label"], card["color"]) == ("lmcache-core kit (quick)", "brightgreen")
