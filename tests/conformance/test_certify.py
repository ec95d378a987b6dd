"""`lmcache-core plugins certify`: the kit from the installed package, over a tier that settings describe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_core.errors import UsageError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.testing.certified import Described
from lmcache_core.tiers.contract import StoreItem
from lmcache_core.tiers.parallel import adapter_context

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
    with pytest.raises(UsageError, match="names no host and port"):
        Described(load_plugins(), "tier", {}, {"where": "box"}, "where").address()
