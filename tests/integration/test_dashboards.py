"""The dashboard and the alert rules name metrics and labels that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from lmcache_core.observe.exposition import text_of
from lmcache_core.observe.metrics import METRICS
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace

HERE = Path(__file__).parents[2] / "contrib/dashboards"
KNOWN = {metric.full_name: metric for metric in METRICS}
KNOWN |= {f"{m.full_name}{end}": m for m in METRICS if m.kind == "histogram" for end in ("_bucket", "_count", "_sum")}
NAME = re.compile(r"lmcache_core_\w+")
OF_SCRAPES = {"instance", "job", "le"}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, as Debian's prometheus brings it"
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
    labels = {label for name in named for label in KNOWN[name].labels} | OF_SCRAPES
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
    registry = load_plugins()
    settings = make_settings(
        registry,
        name=f"prom-{uuid4().hex[:8]}",
        runtime_dir=str(tmp_path / "run"),
        state_dir=str(tmp_path / "state"),
        l1={"size_bytes": 16 << 20, "backing": "memfd"},
        l2={"cold": {"type": "mock"}},
        subscribers={"log": {}},
    )
    space = Namespace("model", Layout("uint8", (4096,)))
    with Server(settings, registry) as server, server.connect() as client:
        assert server.populator.wait(60)
        client.store([bytes(32)], [bytes(4096)], namespace=space)
        assert client.lookup([bytes(32)], namespace=space).hits == 1
        client.lookup([bytes([1]) * 32], namespace=space)
        text = text_of(client.status())
    assert "lmcache_core_tier_call_seconds_bucket{" in text
    promtool("check", "metrics", said=text)
