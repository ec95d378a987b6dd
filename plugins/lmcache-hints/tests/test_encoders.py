"""Envelopes made by the classes of vLLM and SGLang, unmodified: what they encode is what the server executes.

vLLM's come from the environment, if it has vLLM; SGLang's from its wheel, of which two files are imported and nothing
is installed: `pip download --no-deps sglang==0.5.23`, and LMCACHE_CORE_SGLANG_WHEEL says where it is.
"""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from lmcache_core import Client, Layout, Namespace
from lmcache_core.plugins.loader import load_plugins
from lmcache_hints.envelope import HintsReply
from lmcache_testing.embedded import embedded_server

SGLANG = "sglang-0.5.23-"
FILES = ("sglang/srt/managers/kv_hints.py", "sglang/srt/utils/msgspec_utils.py")
NAMESPACE = Namespace("model", Layout("uint8", (4096,)), label="model/u8")


def vllm_protocol() -> ModuleType:
    """The file alone: the package around it would take seconds, and torch."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed here: `nox -s vllm` runs this")
    path = Path(found.submodule_search_locations[0]) / "v1/kv_hints/protocol.py"
    spec = spec_from_file_location("vllm_kv_hints_protocol", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sglang_protocol(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Two files of the wheel, in packages without an `__init__`."""
    wheel = Path(os.environ.get("LMCACHE_CORE_SGLANG_WHEEL", ""))
    if not wheel.is_file():
        pytest.skip("LMCACHE_CORE_SGLANG_WHEEL names no wheel of SGLang: `nox -s vllm` downloads one, if it can")
    assert wheel.name.startswith(SGLANG), f"these tests know {SGLANG}*, not {wheel.name}"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, FILES)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("sglang.srt.managers.kv_hints")


@pytest.fixture(params=["vllm", "sglang"])
def protocol(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return vllm_protocol() if request.param == "vllm" else sglang_protocol(tmp_path / "wheel", monkeypatch)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with embedded_server(tmp_path_factory.mktemp("server"), load_plugins()) as server, server.connect() as client:
        yield client


def envelope(protocol: ModuleType, *actions: tuple[str, str, dict[str, Any]], version: str = "0.1") -> msgspec.Struct:
    made = [
        protocol.KvHintAction(action_id=f"{at}", action_type=kind, action_version=number, payload=payload)
        for at, (kind, number, payload) in enumerate(actions)
    ]
    encoded: msgspec.Struct = protocol.KvHintsEnvelope(protocol_version=version, message_id=uuid4().hex, actions=made)
    return encoded


def objects(client: Client, count: int) -> dict[str, Any]:
    keys = [bytes([at]) * 32 for at in range(count)]
    client.store(keys, [bytes(4096)] * count, namespace=NAMESPACE)
    return {"namespace": "model/u8", "keys": [key.hex() for key in keys]}


def test_an_engines_class_is_a_request_of_the_operation(client: Client, protocol: ModuleType) -> None:
    payload = objects(client, 3)
    sent = envelope(
        protocol, ("kv.pin", "1.0", payload), ("kv.retain", "1.0", {**payload, "ttl_s": 60, "session": "s"})
    )
    outcomes = client.call_operation("hints", sent, HintsReply).outcomes
    assert [(each.action_id, each.outcome, each.done) for each in outcomes] == [
        ("0", "accepted", 3),
        ("1", "accepted", 3),
    ]


def test_what_an_engines_class_encodes_as_json_is_the_same(client: Client, protocol: ModuleType) -> None:
    """As routers send it, in the engine's HTTP request or to the server's own."""
    sent = envelope(protocol, ("kv.pin", "1.0", objects(client, 2)))
    (outcome,) = client.call_operation("hints", msgspec.json.decode(msgspec.json.encode(sent)), HintsReply).outcomes
    assert (outcome.outcome, outcome.done) == ("accepted", 2)


@pytest.mark.parametrize(
    ("kind", "number", "version", "reason"),
    [
        ("kv.fetch", "2.0", "0.1", "has no version '2.0'"),
        ("kv.teleport", "1.0", "0.1", "is no known action"),
        ("kv.pin", "1.0", "0.2", "protocol version '0.2' is not known"),
        ("kv.pin", "1.0", "0.1", "the payload of kv.pin 1.0 is wrong"),
    ],
)
def test_what_is_not_known_of_an_engines_class_is_rejected(
    client: Client, protocol: ModuleType, kind: str, number: str, version: str, reason: str
) -> None:
    sent = envelope(protocol, (kind, number, {"colour": "blue"}), version=version)
    (outcome,) = client.call_operation("hints", sent, HintsReply).outcomes
    assert outcome.outcome == "rejected"
    assert reason in outcome.reason
