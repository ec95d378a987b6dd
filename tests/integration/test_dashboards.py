"""The dashboard and the alert rules name metrics and labels that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lmcache_core.observe.metrics import METRICS

HERE = Path(__file__).parents[2] / "contrib/dashboards"
KNOWN = {metric.full_name: metric for metric in METRICS}
KNOWN |= {f"{m.full_name}{end}": m for m in METRICS if m.kind == "histogram" for end in ("_bucket", "_count", "_sum")}
NAME = re.compile(r"lmcache_core_\w+")
OF_SCRAPES = {"instance", "job", "le"}


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


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, as Debian's prometheus brings it")
def test_promtool_takes_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(HERE / "alerts.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
