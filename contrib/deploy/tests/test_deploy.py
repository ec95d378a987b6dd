"""The units, manifests and container files, as far as they can be tested without systemd, Kubernetes or Docker."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from lmcache_testing.waiting import WAIT_S

HERE = Path(__file__).resolve().parent.parent
UNIT = HERE / "systemd/lmcache-core@.service"
COMMAND = Path(sys.executable).parent / "lmcache-core"
KUBERNETES = "1.30"


def run(*argv: object, stdin: str = "") -> str:
    done = subprocess.run([str(each) for each in argv], input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on this machine: install it to have this checked")
    return found


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with the command where it is on this machine."""
    text = UNIT.read_text().replace("/opt/lmcache-core/bin/lmcache-core", str(COMMAND))
    path = tmp_path / UNIT.name
    path.write_text(text)
    drop_ins = tmp_path / f"{UNIT.name}.d"
    drop_ins.mkdir()
    shutil.copy(UNIT.parent / "memory.conf", drop_ins)
    return path


def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path) -> None:
    done = subprocess.run([tool("systemd-analyze"), "verify", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0
    assert not done.stderr


def test_the_unit_is_as_closed_as_systemd_can_make_it(unit: Path) -> None:
    run(tool("systemd-analyze"), "security", "--offline=true", "--threshold=20", unit)


def calls_of(name: str) -> set[str]:
    """The system calls of one of systemd's sets, or the one of this name."""
    if not name.startswith("@"):
        return {name}
    told = [line.strip() for line in run(tool("systemd-analyze"), "syscall-filter", name).splitlines()[1:]]
    return {call for each in told if each and not each.startswith("#") for call in calls_of(each)}


def test_the_unit_lets_a_server_open_its_pool_to_a_group() -> None:
    allowed: set[str] = set()
    for line in re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.MULTILINE):
        calls = {call for name in line.lstrip("~").split() for call in calls_of(name)}
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    assert {"openat", "mmap", "chown", "fchown"} <= allowed


def test_a_unit_starts_whatever_is_away_and_leaves_a_pool_that_is_to_be_kept() -> None:
    lines = re.findall(r"^Exec(\w+)=", UNIT.read_text(), re.MULTILINE)
    assert lines == ["Start"]


def test_an_engines_pod_trusts_the_servers_user() -> None:
    pod = yaml.safe_load((HERE / "kubernetes/engine-pod.yaml").read_text())
    server = yaml.safe_load((HERE / "kubernetes/base/daemonset.yaml").read_text())["spec"]["template"]["spec"]
    told = {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}
    assert told["LMCACHE_CORE_SERVER_UID"] == str(server["securityContext"]["runAsUser"])


def test_every_flag_and_command_of_the_unit_exists(unit: Path) -> None:
    for line in re.findall(r"^Exec\w+=.*$", UNIT.read_text(), re.MULTILINE):
        words = line[line.index("bin/lmcache-core") :].rstrip("'").split()[1:]
        told = run(COMMAND, words[0], "--help")
        for flag in (word for word in words if word.startswith("--")):
            assert flag in told or run(COMMAND, words[0], "--help", "--all").count(flag), f"{words[0]} has no {flag}"


class Manager:
    """The end of the notification socket at which systemd would be."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(WAIT_S)

    def hears(self) -> str:
        return self._socket.recv(4096).decode()

    def close(self) -> None:
        self._socket.close()


def test_a_server_tells_systemd_that_it_is_ready_alive_and_stopping(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    server = subprocess.Popen(
        [COMMAND, "serve", "--name", "unit", "--l1.size_bytes", "16MiB", "--l1.backing", "memfd",
         "--runtime_dir", tmp_path / "run", "--state_dir", tmp_path / "state"],
        env={"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "1000000", "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        heard = {manager.hears() for _ in range(4)}
        assert heard == {"READY=1", "WATCHDOG=1"}
        server.terminate()
        while manager.hears() != "STOPPING=1":
            pass
        assert server.wait(WAIT_S) == 0
    finally:
        server.kill()
        server.communicate()
        manager.close()


def rendered(folder: str) -> list[dict[str, Any]]:
    """The manifests of a kustomization."""
    return list(yaml.safe_load_all(run(tool("kubectl"), "kustomize", HERE / "kubernetes" / folder)))


FOLDERS = ["base", "overlays/disk", "overlays/shm", "overlays/redis", "overlays/peers", "overlays/monitored"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_manifests_are_what_kubernetes_expects(folder: str) -> None:
    known = [each for each in rendered(folder) if each["kind"] != "ServiceMonitor"]
    said = run(tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, "-", stdin=yaml.safe_dump_all(known))
    assert said.count("passed") == len(known) >= 5
    run(tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, HERE / "kubernetes/engine-pod.yaml")


def test_the_service_monitor_is_one_and_finds_the_service() -> None:
    found = {each["kind"]: each for each in rendered("overlays/monitored")}
    monitor, service = found["ServiceMonitor"], found["Service"]
    schema = json.loads((HERE / "kubernetes/overlays/monitored/servicemonitor.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(monitor, schema)
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {each["port"] for each in monitor["spec"]["endpoints"]} <= {
        each["name"] for each in service["spec"]["ports"]
    }
    assert service["spec"]["selector"] == found["DaemonSet"]["spec"]["selector"]["matchLabels"]
    spoilt = json.loads(json.dumps(monitor))
    spoilt["spec"]["endpoints"][0]["intervall"] = "15s"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spoilt, schema)


def test_a_server_as_the_monitored_pod_has_it_answers_its_probes_and_its_scrape(tmp_path: Path) -> None:
    found = {each["kind"]: each for each in rendered("overlays/monitored")}
    (container,) = found["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    values = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    pod_ip = "10.1.2.3"
    allowed = values["LMCACHE_CORE_HTTP__ALLOWED_HOSTS"].replace("$(POD_IP)", pod_ip)
    for name in ("token", "read-token"):
        (tmp_path / name).write_text(f"{name}-0123456789abcdef0123456789abcdef")
    port = free_port()
    server = subprocess.Popen(
        [COMMAND, "serve", "--config", HERE / "kubernetes/overlays/monitored/lmcache.toml",
         "--l1.size_bytes", "16MiB", "--l1.access", "owner", "--l1.gids", "[]",
         "--runtime_dir", tmp_path / "run", "--state_dir", tmp_path / "state", "--http.port", str(port),
         "--http.token_file", tmp_path / "token", "--http.read_token_file", tmp_path / "read-token"],
        env=os.environ | {"LMCACHE_CORE_HTTP__ALLOWED_HOSTS": allowed, "HOME": str(tmp_path)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert "ready" in server.stdout.readline()
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            path = container[probe]["httpGet"]["path"]
            while answer(port, path, pod_ip) != 200:
                assert server.poll() is None
        (scraped,) = found["ServiceMonitor"]["spec"]["endpoints"]
        token = (tmp_path / scraped["authorization"]["credentials"]["key"]).read_text()
        assert answer(port, scraped["path"], pod_ip, token) == 200
        assert answer(port, scraped["path"], pod_ip) == 401
        assert answer(port, "/livez", "10.9.9.9") == 421
    finally:
        server.terminate()
        server.communicate()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def answer(port: int, path: str, host: str, token: str = "") -> int:
    """The status that who comes by the pod's address gets; 0 while nobody listens."""
    headers = {"Host": f"{host}:{port}"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return 0


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_settings_in_the_manifests_are_settings(folder: str) -> None:
    said = run(COMMAND, "config", "--config", HERE / "kubernetes" / folder / "lmcache.toml", "--json")
    assert "size_bytes" in said


def test_the_key_of_the_secret_is_the_setting_that_the_redis_overlay_mounts(tmp_path: Path) -> None:
    folder = HERE / "kubernetes/overlays/redis"
    (made,) = re.findall(r"--from-file=(\S+)=", (folder / "kustomization.yaml").read_text())
    pod = yaml.safe_load((folder / "secrets.yaml").read_text())["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (mount,), (variable,) = container["volumeMounts"], container["env"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], variable["value"])
    data = tmp_path / "..2026_11_26"  # as the kubelet mounts it
    data.mkdir()
    (data / made).write_text("hunter2-hunter2\n")
    (tmp_path / "..data").symlink_to(data.name)
    (tmp_path / made).symlink_to(f"..data/{made}")
    words = [COMMAND, "config", "--json", "--config", folder / "lmcache.toml"]
    done = subprocess.run(
        words, env=os.environ | {variable["name"]: str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)[made] == {"value": "**********", "origin": "secret", "where": str(tmp_path / made)}
    assert "hunter2" not in done.stdout + done.stderr
    assert not done.stderr


def test_the_nodes_of_the_peers_overlay_find_the_directory_and_may_reach_each_other() -> None:
    found = rendered("overlays/peers")
    named = {(each["kind"], each["metadata"]["name"]): each for each in found}
    settings = tomllib.loads((HERE / "kubernetes/overlays/peers/lmcache.toml").read_text())
    for table in (settings["peer"], settings["l2"]["peers"]):
        host, port = table["redis_url"].removeprefix("redis://").partition("/")[0].split(":")
        assert int(port) in {each["port"] for each in named["Service", host]["spec"]["ports"]}
    pod = named["DaemonSet", "lmcache-core"]["spec"]["template"]
    (server,) = pod["spec"]["containers"]
    peers, policy = named["Service", "lmcache-peers"]["spec"], named["NetworkPolicy", "lmcache-core"]["spec"]
    assert peers["clusterIP"] == "None"
    assert peers["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {settings["peer"]["port"]}
    assert ports == {each["containerPort"] for each in server["ports"]} == {each["port"] for each in peers["ports"]}
    assert ports == {each["port"] for each in policy["ingress"][0]["ports"]}
    assert ports < {each["port"] for each in policy["egress"][0]["ports"]}
    (source,) = policy["ingress"][0]["from"]
    assert source["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (mount,) = (each["mountPath"] for each in server["volumeMounts"] if each["name"] == "peers")
    files = {name: value for name, value in settings["peer"].items() if name.startswith("tls_")}
    assert len(files) == 3
    assert all(str(Path(value).parent) == mount for value in files.values())
    assert files.items() <= settings["l2"]["peers"].items()


def test_the_compose_file_builds_the_image_that_all_its_services_run() -> None:
    folder = HERE / "container"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    build = services["server"]["build"]
    assert (folder / build["context"] / build["dockerfile"]).resolve() == folder / "Dockerfile"
    chart = yaml.safe_load((HERE / "helm/lmcache-core/Chart.yaml").read_text())
    ours = {each["image"] for name, each in services.items() if name != "redis"}
    assert ours == {f"lmcache-core:{chart['appVersion']}"}


def test_the_worker_of_the_compose_file_finds_what_another_stored(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    server = subprocess.Popen(
        [COMMAND, "serve", "--name", "default", "--l1.size_bytes", "64MiB", "--l1.backing", "memfd",
         "--runtime_dir", run_dir, "--state_dir", tmp_path / "state"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert "ready" in server.stdout.readline()
        env = {"LMCACHE_CORE_RUNTIME_DIR": str(run_dir), "HOME": str(tmp_path)}
        said = [
            subprocess.run(
                [sys.executable, HERE / "container/worker.py"], env=env, capture_output=True, text=True, check=True
            ).stdout
            for _ in range(2)
        ]
        assert ": 0 of 16 chunks were there" in said[0]
        assert ": 16 of 16 chunks were there" in said[1]
    finally:
        server.terminate()
        server.communicate()
