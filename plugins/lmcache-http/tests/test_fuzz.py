"""Every route against what its schema says, with what fits the schema and what does not. `nox -s fuzz` has the tool."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from lmcache_testing.waiting import WAIT_S

schemathesis = pytest.importorskip("schemathesis")
pytest.importorskip("schemathesis.specs.openapi.checks")
requests = pytest.importorskip("requests")

EXAMPLES = 30
BUSY = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# Whether there is such a tier, or a layout has as many axes as its shape, no schema says.
JUDGED_BY_THE_SERVER = [schemathesis.specs.openapi.checks.positive_data_acceptance]
TOKEN = "correct-horse"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with its HTTP interface, everything populated."""
    folder = tmp_path_factory.mktemp("fuzz")
    token, port = folder / "token", free_port()
    token.write_text(TOKEN)
    argv = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--name", f"f{uuid4().hex[:10]}"]
    argv += ["--runtime_dir", str(folder / "run"), "--state_dir", str(folder / "state")]
    argv += ["--l1.size_bytes", "16MiB", "--l1.backing", "memfd", "--http.port", str(port)]
    argv += ["--http.token_file", str(token)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
    try:
        while not _ready(url):
            assert time.monotonic() < end
            time.sleep(0.05)
        yield url
        assert _ready(url), "and all of that has hurt nobody"
        metrics = requests.get(f"{url}/metrics", headers=HEADERS, timeout=WAIT_S).text
        for name in ("loop_faults", "internal_errors", "garbage_frames"):
            assert f"lmcache_core_{name}_total 0.0" in metrics, name
    finally:
        process.terminate()
        process.wait(WAIT_S)


def _ready(url: str) -> bool:
    try:
        return bool(requests.get(f"{url}/readyz", timeout=WAIT_S).status_code == 200)
    except requests.ConnectionError:
        return False


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_as_the_schema_says(address: str, mode: Any) -> None:
    api = schemathesis.openapi.from_url(f"{address}/openapi.json", headers=HEADERS)
    asked: set[str] = set()
    for found in api.exclude(path="/events").get_all_operations():
        route = found.ok()
        if mode.is_negative and not (route.body or route.path_parameters):
            continue  # there is nothing to be wrong

        @settings(BUSY, max_examples=EXAMPLES)
        @given(case=route.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            reply = case.call(headers=HEADERS)
            case.validate_response(reply, excluded_checks=JUDGED_BY_THE_SERVER)
            if reply.status_code >= 400:
                assert isinstance(reply.json()["detail"], str)

        ask()
        asked.add(route.label)
    assert {"POST /clear", "POST /pin", "POST /explain", "POST /tiers/{name}", "PUT /quota/{tenant}"} <= asked
