"""`check --engine vllm` over a real server, with clients in place of an engine."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from lmcache_core import Finding
from lmcache_core.cli.main import main
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_core_vllm.checking import server_findings
from lmcache_testing.processes import ServerProcess

NAMESPACE = Namespace("m", Layout("uint8", (4096,)))


def by_subject(found: list[Finding]) -> dict[str, Finding]:
    return {each.subject: each for each in found}


def test_it_says_what_engines_missed_and_in_which_namespace() -> None:
    with ServerProcess(16 << 20) as server, server.client(client_name="vllm-scheduler") as client:
        said = by_subject(list(server_findings(client.status())))
        assert all(each.ok for each in said.values())
        assert "vllm-scheduler" in said["engines"].message
        assert "none" in said["misses"].message
        client.lookup([bytes([at]) * 32 for at in range(3)], namespace=NAMESPACE, prefix=False)
        said = by_subject(list(server_findings(client.status())))
        row = said[f"namespace {NAMESPACE.id:016x}, {NAMESPACE.public_label}"]
        assert row.message.startswith("0 of 3 keys were found")
        assert "logs" in row.cure
        assert "3 blocks missed" in said["misses"].message
        assert "never stored" in said["misses"].message
        assert "none" in said["prompts"].message
        client.count_prompt(640, 512, not_asked=[128])  # as the scheduler's side does, without a call
        said = by_subject(list(server_findings(client.status())))
        assert said["prompts"].message.startswith("512 of 640 tokens were found (80.0%), in 1 lookup")
        row = said[f"namespace {NAMESPACE.id:016x}, {NAMESPACE.public_label}"]
        assert (row.message, row.cure) == ("512 of 640 tokens were found", "")


def test_the_first_prompt_of_all_needs_no_look_and_the_second_does() -> None:
    with ServerProcess(16 << 20) as server, server.client() as client:
        cures = []
        for prompt in range(2):
            client.lookup([bytes([prompt]) * 32], namespace=NAMESPACE)
            client.count_prompt(640, 0, not_asked=[])
            row = by_subject(list(server_findings(client.status())))[
                f"namespace {NAMESPACE.id:016x}, {NAMESPACE.public_label}"
            ]
            cures.append(row.cure)
        assert cures[0] == ""
        assert "logs" in cures[1]


def test_another_version_of_the_server_is_a_fault() -> None:
    with ServerProcess(16 << 20) as server, server.client() as client:
        status = client.status()
    status["server"]["version"] = "0.0.7"
    said = by_subject(list(server_findings(status)))
    assert not said["server"].ok
    assert "0.0.7" in said["server"].message


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here: tests/engine has the same for that")
def test_it_says_what_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    flags = ["--name", "nobody", "--runtime_dir", str(tmp_path)]
    assert main(["check", "--engine", "vllm", "--json", *flags]) == 1
    said = {each["subject"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert "vLLM is not installed" in said["connector"]["message"]
    assert "start one with `lmcache-core serve" in said["server"]["message"]
