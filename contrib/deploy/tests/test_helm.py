"""The chart, by helm itself, the schemas of Kubernetes, and rules for what neither of them sees."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from contrib.deploy.tests.test_deploy import COMMAND, HERE, KUBERNETES, run, tool

CHART = HERE / "helm/lmcache-core"
EVERYTHING = (
    "http.enabled=true,monitoring.serviceMonitor=true,monitoring.prometheusRule=true,monitoring.dashboard=true,"
    "podDisruptionBudget.enabled=true,disk.path=/var/cache/lmcache-core,secrets.name=passwords,"
    "priorityClassName=system-node-critical,networkPolicy.kvEventsPort=5557,settings.l2.disk.type=fs,"
    "settings.l2.disk.path=/var/cache/lmcache-core,settings.l2.disk.capacity_bytes=200GiB,peers.enabled=true"
)
PEERS = "peers.enabled=true,peers.port=7700,peers.redisUrl=rediss://directory.example:6380/0"
CHOICES = ["", "http.enabled=true", "settings.l1.backing=shm,networkPolicy.enabled=false", PEERS, EVERYTHING]
OPERATORS = {"ServiceMonitor", "PrometheusRule"}  # of the Prometheus operator: Kubernetes has no schema of them


def template(values: str) -> subprocess.CompletedProcess[str]:
    command = [tool("helm"), "template", "cache", str(CHART), *(["--set", values] if values else [])]
    return subprocess.run(command, capture_output=True, text=True)


def rendered(values: str) -> list[dict[str, Any]]:
    done = template(values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (each for each in manifests if each["kind"] == kind)
    return found


@pytest.mark.parametrize("values", CHOICES)
def test_helm_and_kubernetes_find_nothing_wrong_with_the_chart(values: str) -> None:
    run(tool("helm"), "lint", "--strict", CHART, *(["--set", values] if values else []))
    known = [each for each in rendered(values) if each["kind"] not in OPERATORS]
    said = run(tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, "-", stdin=yaml.safe_dump_all(known))
    assert said.count("passed") == len(known) >= 3


def wrong(manifests: list[dict[str, Any]]) -> list[str]:
    """What a cluster would take without a word, and not do."""
    found = []
    pods = [each["spec"]["template"] for each in manifests if each["kind"] in ("DaemonSet", "Deployment")]
    labels = [pod["metadata"]["labels"].items() for pod in pods]
    for each in manifests:
        kind, spec = each["kind"], each.get("spec", {})
        if kind == "PodDisruptionBudget" and type(spec.get("minAvailable")) is not int:
            found.append("a budget over a DaemonSet counts pods: nobody can tell what a share of them is")
        chosen = {"Service": spec.get("selector"), "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels")}
        selector = chosen.get(kind) or spec.get("selector", {}).get("matchLabels")
        if kind != "ServiceMonitor" and selector and not any(selector.items() <= some for some in labels):
            found.append(f"{kind} selects no pod")
    for pod in pods:
        mounts = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        used = {mount["name"] for container in containers for mount in container.get("volumeMounts", [])}
        found += [f"volume {name} is not mounted" for name in mounts - used]
        for container in containers:
            if "memory" not in container["resources"]["limits"]:
                found.append(f"{container['name']} has no limit of memory")
    return found


@pytest.mark.parametrize("values", CHOICES)
def test_what_the_chart_renders_does_what_it_says(values: str) -> None:
    assert wrong(rendered(values)) == []


def test_the_rules_see_what_the_schemas_do_not() -> None:
    manifests = rendered(EVERYTHING)
    of_kind(manifests, "PodDisruptionBudget")["spec"] = {"maxUnavailable": 1, "selector": {"matchLabels": {"a": "b"}}}
    del of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert len(wrong(manifests)) == 3


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ("monitoring.dashboard=true", "monitoring.* needs http.enabled=true"),
        ("settings.http.port=80", "settings.http"),
        ("podDisruptionBudget.minAvailable=50%", "minAvailable"),
        ("uid=0", "uid"),
        ("nodeselector.gpu=yes", "nodeselector"),
        ("disk.path=cache", "disk.path"),
        ("peers.redisUrl=directory:6379", "peers.redisUrl"),
        ("settings.l2.peers.type=fs", "settings.l2.peers"),
    ],
)
def test_values_that_would_not_work_are_refused_by_name(values: str, reason: str) -> None:
    done = template(values)
    assert done.returncode != 0
    assert reason in done.stderr


def test_every_value_is_in_the_schema_and_every_property_has_a_default() -> None:
    def names(properties: dict[str, Any]) -> dict[str, Any]:
        return {name: names(each.get("properties", {})) for name, each in properties.items() if isinstance(each, dict)}

    schema = names(json.loads((CHART / "values.schema.json").read_text())["properties"])
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert schema.keys() - {"global"} == values.keys()
    for name, inner in schema.items():
        if inner and name != "settings":
            assert inner.keys() == values[name].keys(), name


@pytest.mark.parametrize("values", CHOICES)
def test_the_settings_are_settings_and_fit_the_pods_memory(values: str, tmp_path: Path) -> None:
    manifests = rendered(values)
    config = next(each["data"]["lmcache.toml"] for each in manifests if "lmcache.toml" in each.get("data", {}))
    file = tmp_path / "lmcache.toml"
    file.write_text(config)
    assert "size_bytes" in run(COMMAND, "config", "--config", file, "--json")
    (container,) = of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    pool = tomllib.loads(config)["l1"]["size_bytes"]
    limit = container["resources"]["limits"]["memory"]
    assert int(limit.removesuffix("Gi")) >= 1.1 * int(pool.removesuffix("GiB"))


@pytest.mark.parametrize(("values", "port"), [(PEERS, 7700), (EVERYTHING, 7600)])
def test_nodes_reach_each_other_and_nobody_else_reaches_them(values: str, port: int) -> None:
    manifests = rendered(values)
    pod = of_kind(manifests, "DaemonSet")["spec"]["template"]
    config = tomllib.loads(
        next(each["data"]["lmcache.toml"] for each in manifests if "lmcache.toml" in each.get("data", {}))
    )
    (server,) = pod["spec"]["containers"]
    policies = {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "NetworkPolicy"}
    doors = [rule for rule in policies["cache"]["ingress"] if "podSelector" in rule["from"][0]]
    (door,) = doors
    assert config["peer"]["port"] == port
    assert {"name": "peer", "containerPort": port} in server["ports"]
    assert door["ports"] == [{"protocol": "TCP", "port": port}]
    assert door["from"][0]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {"protocol": "TCP", "port": port} in policies["cache"]["egress"][0]["ports"]
    services = {each["metadata"]["name"] for each in manifests if each["kind"] == "Service"}
    directory = config["peer"]["redis_url"]
    assert config["l2"]["peers"]["redis_url"] == directory
    ours = directory == "redis://cache-directory:6379/0"
    assert ours == ("cache-directory" in services) == ("cache-directory" in policies)
    (mount,) = (each["mountPath"] for each in server["volumeMounts"] if each["name"] == "peers")
    files = [
        value for table in (config["peer"], config["l2"]["peers"]) for name, value in table.items() if "tls_" in name
    ]
    assert len(files) == 6
    assert all(Path(each).parent == Path(mount) for each in files)


def test_alerts_and_dashboard_are_those_of_the_repository() -> None:
    manifests = rendered(EVERYTHING)
    dashboards = HERE.parent / "dashboards"
    assert of_kind(manifests, "PrometheusRule")["spec"] == yaml.safe_load((dashboards / "alerts.yaml").read_text())
    shown = next(each["data"]["grafana.json"] for each in manifests if "grafana.json" in each.get("data", {}))
    assert json.loads(shown) == json.loads((dashboards / "grafana.json").read_text())
