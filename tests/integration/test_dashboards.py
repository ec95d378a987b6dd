"""The dashboard and the alert rules name metrics and labels that there are."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from prometheus_client import ProcessCollector

from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_http.metrics import METRICS, text_of
from lmcache_testing.embedded import NAMELESS, Json, embedded_server
from lmcache_testing.waiting import WAIT_S, until

HERE = Path(__file__).parents[2] / "contrib/dashboards"
KNOWN = {metric.full_name: metric.labels for metric in METRICS}
KNOWN |= {
    f"{m.full_name}{end}": m.labels for m in METRICS if m.kind == "histogram" for end in ("_bucket", "_count", "_sum")
}
KNOWN |= {
    sample.name: ("process",) for family in ProcessCollector(registry=None).collect() for sample in family.samples
}
NAME = re.compile(r"(?:lmcache_core|process)_\w+")
OF_SCRAPES = {"instance", "job", "le", "cluster"}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, as Debian's prometheus brings it"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs prometheus, as Debian packages it"
)


def expressions() -> list[tuple[str, str]]:
    """(where, expression and what is written from its labels)."""
    panels = json.loads((HERE / "grafana.json").read_text())["panels"]
    found = [(each["title"], f"{one['expr']} {one['legendFormat']}") for each in panels for one in each["targets"]]
    for rule in (HERE / "alerts.yaml").read_text().split("- alert: ")[1:]:
        found.append((rule.split("\n")[0], rule))
    return found


@pytest.mark.parametrize(("where", "text"), expressions())
def test_every_metric_and_label_is_there(where: str, text: str) -> None:
    named = NAME.findall(text)
    assert named, f"{where} asks for nothing"
    assert [name for name in named if name not in KNOWN] == []
    labels = {label for name in named for label in KNOWN[name]} | OF_SCRAPES
    asked = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
    asked |= {label.strip() for by in re.findall(r"by \(([^)]*)\)", text) for label in by.split(",")}
    asked |= set(re.findall(r"[{,]\s*(\w+)\s*=[~\"]", text))
    assert asked - labels == set()


def test_the_dashboard_is_whole() -> None:
    board = json.loads((HERE / "grafana.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    for rule in (HERE / "alerts.yaml").read_text().split("- alert: ")[1:]:
        for part in ("expr:", "severity:", "summary:", "description:"):
            assert part in rule, rule


def test_every_alert_is_seen_to_fire_by_a_test() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", (HERE / "alerts.yaml").read_text()))
    tested = re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", (HERE / "alerts_test.yaml").read_text())
    assert set(tested) == alerts


def promtool(*arguments: str, said: str | None = None) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=HERE, input=said, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    promtool("check", "rules", "alerts.yaml")


@needs_promtool
def test_the_rules_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "alerts_test.yaml")


@needs_promtool
def test_promtool_has_nothing_to_say_of_the_metrics_of_a_server_with_everything(tmp_path: Path) -> None:
    space = Namespace("model", Layout("uint8", (4096,)))
    settings = {"l1": {"backing": "memfd"}, "l2": {"cold": {"type": "mock"}}, "subscribers": {"log": {}}}
    with embedded_server(tmp_path, **settings) as server, server.connect() as client:
        client.store([bytes(32)], [bytes(4096)], namespace=space)
        assert client.lookup([bytes(32)], namespace=space).hits == 1
        client.lookup([bytes([1]) * 32], namespace=space)
        text = text_of(client.status())
    assert "lmcache_core_tier_call_seconds_bucket{" in text
    promtool("check", "metrics", said=text)


class Prometheus:
    """A real one, that scrapes one server as the page says."""

    def __init__(self, folder: Path, target: str, token_file: Path) -> None:
        (block,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
        block = block.replace("127.0.0.1:8080", target).replace("/etc/lmcache/http-read-token", str(token_file))
        (folder / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s}}\n{block}")
        self._address = f"127.0.0.1:{free_port()}"
        argv = ["prometheus", "--log.level=error", f"--config.file={folder}/prometheus.yml"]
        argv += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={self._address}"]
        self.process = subprocess.Popen(argv)

    def ask(self, path: str, **query: str) -> Json:
        asked = f"http://{self._address}/api/v1/{path}?{urlencode(query)}"
        try:
            with urllib.request.urlopen(asked, timeout=WAIT_S) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                raise
            pytest.fail(f"{query}: {error.read().decode()}")

    def value(self, expression: str, cluster: str = ".*") -> list[float]:
        """As a panel has it. What divides by nothing is no value."""
        for name, value in {"__rate_interval": "1m", "__range": "1h", "cluster": cluster}.items():
            expression = expression.replace(f"${name}", value)
        found = self.ask("query", query=re.sub(r"\$\w+", ".*", expression))["result"]
        return [value for each in found if not math.isnan(value := float(each["value"][1]))]

    def is_up(self) -> bool:
        try:
            return bool(self.value('up{job="lmcache"} == 1'))
        except OSError:
            return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@needs_prometheus
def test_a_prometheus_answers_whatever_the_dashboard_asks(tmp_path: Path) -> None:
    token, port = tmp_path / "token", free_port()
    token.write_text("battery-staple")
    tables = {
        "l1": NAMELESS,
        "l2": {"cold": {"type": "mock"}, "warm": {"type": "mock"}},
        "http": {"port": port, "read_token_file": str(token)},
    }
    board = json.loads((HERE / "grafana.json").read_text())
    space = Namespace("model", Layout("uint8", (4096,)), label="llama-3-8b/bf16")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(embedded_server(tmp_path, **tables))
        client = stack.enter_context(server.connect())
        prometheus = Prometheus(tmp_path, f"127.0.0.1:{port}", token)
        stack.callback(prometheus.process.wait, WAIT_S)
        stack.callback(prometheus.process.terminate)
        until(prometheus.is_up)
        client.store([bytes(32)], [bytes(4096)], namespace=space)

        def values(panel: dict[str, Any], cluster: str = ".*") -> list[list[float]]:
            client.lookup([bytes(32), bytes([1]) * 32], namespace=space)  # a hit, and a miss that tiers are asked for
            return [prometheus.value(target["expr"], cluster) for target in panel["targets"]]

        panels = {panel["title"]: panel for panel in board["panels"]}
        for panel in board["panels"]:  # none is refused
            values(panel)
        for title in [each for each in panels if each in STATS or "by namespace" in each or "Processes" in each]:
            until(lambda title=title: all(values(panels[title])))
        assert values(panels["Hit rate"])[0] == [pytest.approx(0.5, abs=0.2)]
        assert values(panels["In the L1"]) == [[4096]]
        assert values(panels["Tiers"]) == [[2], [0]]
        assert values(panels["Hit rate"], "elsewhere") == [[]]
        for variable, wanted in {"cluster": "lab", "namespace": space.label, "instance": f"127.0.0.1:{port}"}.items():
            (query,) = (each["query"] for each in board["templating"]["list"] if each["name"] == variable)
            ((series, label),) = re.findall(r"label_values\((.*), (\w+)\)", re.sub(r"\$\w+", ".*", query))
            assert prometheus.ask(f"label/{label}/values", **{"match[]": series}) == [wanted]


STATS = {"Hit rate", "In the L1", "Tiers", "Lookups, 99th percentile"}
