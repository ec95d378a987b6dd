"""The container image: built by buildah over a base of Debian's packages, measured, and run as far as a chroot can.

By flag, `nox -s image`: it needs buildah, mmdebstrap, a Debian mirror and two minutes. LMCACHE_CORE_IMAGE_WHEELS names
a folder with the wheels of our packages and of all that they need.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

WHEELS = os.environ.get("LMCACHE_CORE_IMAGE_WHEELS", "")
pytestmark = pytest.mark.skipif(not WHEELS, reason="by flag: nox -s image")

HERE = Path(__file__).resolve().parent.parent / "container"
SUITE = "bookworm"  # whose Python is that of the wheels
COMPRESSED_BYTES_MAX = 120 * 10**6
WAIT_S = 120.0
LEFT_OUT = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "man", "locale", "info")]
ANYTHING = {"default": [{"type": "insecureAcceptAnything"}]}


class Images:
    """buildah with a storage of its own, so that nothing stays on the machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        policy = folder / "policy.json"
        policy.write_text(json.dumps(ANYTHING))
        self._words = ["buildah", "--storage-driver", "vfs", "--root", str(folder / "root")]
        self._words += ["--runroot", str(folder / "runroot")]
        self.policy = ["--signature-policy", str(policy)]

    def __call__(self, *argv: object) -> str:
        done = subprocess.run([*self._words, *map(str, argv)], capture_output=True, text=True)
        assert done.returncode == 0, f"buildah {argv[0]} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def inside(self, container: str, *argv: object, sockets: Path) -> list[str]:
        """The words that run a command in a container, as the image's user, with the folder of sockets in it."""
        mount = ["--volume", f"{sockets}:/run/lmcache-core"]
        return [*self._words, "run", "--isolation", "chroot", *mount, container, "--", *map(str, argv)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """With `lmcache-core` built from the Dockerfile."""
    for name in ("buildah", "mmdebstrap"):
        assert shutil.which(name), f"apt-get install {name}: it builds the image here"
    folder = tmp_path_factory.mktemp("images")
    images = Images(folder)
    base = folder / "base"
    base.mkdir()
    include = "--include=python3-venv,ca-certificates"
    made = ["mmdebstrap", "--variant=minbase", include, *LEFT_OUT, SUITE, str(base / "base.tar")]
    subprocess.run(made, check=True, capture_output=True)
    (base / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
    images("build", *images.policy, "--isolation", "chroot", "-t", "debian-python", base)
    context = folder / "context"
    shutil.copytree(WHEELS, context / "dist")
    images(
        *("build", *images.policy, "--isolation", "chroot", "--format", "docker", "--pull-never"),
        *("--build-arg", "BASE=localhost/debian-python", "--build-arg", "PIP_NO_INDEX=1"),
        *("-f", HERE / "Dockerfile", "-t", "lmcache-core", context),
    )
    yield images
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    """The shared folder, of the image's user."""
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o750)
    os.chown(folder, 2000, 2000)
    for each in (tmp_path, *tmp_path.parents):  # pytest's folders are its user's alone
        if each.is_relative_to("/tmp") and each != Path("/tmp"):
            each.chmod(0o755)
    return folder


@contextmanager
def served(images: Images, sockets: Path, *options: object) -> Iterator[None]:
    """A server in a container. It is killed with the buildah that runs it: no signal is passed on into a chroot."""
    container = images("from", "--pull-never", "lmcache-core").strip()
    words = images.inside(container, "lmcache-core", *options, sockets=sockets)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        yield
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(WAIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        images("rm", container)


@contextmanager
def container(images: Images, sockets: Path) -> Iterator[Any]:
    """Another container of the image, in which commands run to their ends."""
    name = images("from", "--pull-never", "lmcache-core").strip()

    def run(*argv: object, ok: bool = True) -> subprocess.CompletedProcess[str]:
        words = images.inside(name, *argv, sockets=sockets)
        return subprocess.run(words, capture_output=True, text=True, check=ok)

    yield run
    images("rm", name)


def test_the_image_is_small_and_has_neither_a_compiler_nor_root(images: Images, sockets: Path) -> None:
    out = images.folder / "oci"
    images("push", *images.policy, "--format", "oci", "lmcache-core", f"oci:{out}:latest")
    nbytes = sum(path.stat().st_size for path in (out / "blobs").rglob("*") if path.is_file())
    print(f"compressed: {nbytes / 1e6:.1f} MB")
    assert nbytes < COMPRESSED_BYTES_MAX
    config = json.loads(images("inspect", "--type", "image", "lmcache-core"))["Docker"]["config"]
    assert config["User"] == "2000:2000"
    assert config["Healthcheck"]["Test"][1:] == ["lmcache-core", "status", "--json"]
    assert config["StopSignal"] == "SIGTERM"
    with container(images, sockets) as run:
        assert run("id", "-u").stdout == "2000\n"
        for name in ("gcc", "cc", "pip"):
            assert run("sh", "-c", f"command -v {name}", ok=False).returncode != 0


def test_a_server_in_it_serves_is_healthy_and_checks_out(images: Images, sockets: Path) -> None:
    options = ("serve", "--l1.size_bytes", "64MiB", "--l1.backing", "memfd")
    with container(images, sockets) as run:
        assert run("lmcache-core", "status", "--json", ok=False).returncode != 0
        with served(images, sockets, *options):
            began_s = time.monotonic()
            assert json.loads(run("lmcache-core", "status", "--json").stdout)
            print(f"health check: {time.monotonic() - began_s:.1f} s")
            said = run("lmcache-core", "check", *options[1:], "--name", "other")
            assert "C extension" in said.stdout + said.stderr
        assert run("lmcache-core", "status", "--json", ok=False).returncode != 0


def test_the_compose_file_played_by_hand_shares_one_cache(images: Images, sockets: Path, tmp_path: Path) -> None:
    """Redis, server and workers with the words of compose.yaml; but for names on a network, of which there is none."""
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((HERE / "compose.yaml").read_text())["services"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        redis = subprocess.Popen(
            [*services["redis"]["command"], "--port", str(port), "--dir", str(tmp_path)], stdout=subprocess.DEVNULL
        )
        stack.callback(redis.wait)
        stack.callback(redis.terminate)
        words = [word.replace("redis:6379", f"127.0.0.1:{port}") for word in services["server"]["command"]]
        stack.enter_context(served(images, sockets, *words))
        run = stack.enter_context(container(images, sockets))
        said = [run(services["worker"]["entrypoint"][0], "-c", (HERE / "worker.py").read_text()).stdout for _ in "12"]
        assert ": 0 of 16 chunks were there" in said[0]
        assert ": 16 of 16 chunks were there" in said[1]
        status = json.loads(run("lmcache-core", "status", "--json").stdout)
        assert "redis" in json.dumps(status)


def test_the_wheels_are_for_the_python_of_the_base() -> None:
    assert sys.version_info[:2] == (3, 11), f"{SUITE} has Python 3.11: run this session by it"
