"""The matrix: the same tests over every backend, each a real service.

`--backend NAME` (repeatable) says which; by default those whose programs are installed. With `LMCACHE_CORE_MATRIX=1`
a service that cannot start is a failure, not a skip. `--endpoint` names a service of your own instead of one that
the tests start: a Redis URL, an S3 endpoint, a Mooncake master, a directory.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

    from matrix_world import World
    from services.moto import S3Service
    from services.proxy import Proxies
    from services.service import Service

# The services are a package beside this file, and pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

# The misbehaving HTTP front that the S3 adapter's own tests use.
_FRONT = Path(__file__).parents[2] / "plugins" / "lmcache-s3" / "tests" / "s3_front.py"

# backend → (module, class). A module is imported when its backend is used: not everybody has boto3.
BACKENDS = {
    "disk": ("services.disk", "Disk"),
    "block": ("services.block", "Block"),
    "redis": ("services.redis_standalone", "RedisStandalone"),
    "redis-tls": ("services.redis_tls", "RedisTls"),
    "redis-sentinel": ("services.redis_sentinel", "RedisSentinel"),
    "redis-cluster": ("services.redis_cluster", "RedisCluster"),
    "mooncake": ("services.mooncake_store", "Mooncake"),
    "s3-moto": ("services.moto", "Moto"),
    "s3-radosgw": ("services.radosgw", "RadosGateway"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("matrix")
    group.addoption("--backend", action="append", choices=sorted(BACKENDS), help="a backend to test; repeatable")
    group.addoption("--endpoint", help="a service of your own to test, with exactly one --backend")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "backends(*names): the test is about these backends only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of `service` runs once for each backend that was asked for, and that it is about."""
    if "service" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--backend") or ["disk", "redis"]
        for mark in metafunc.definition.iter_markers("backends"):
            chosen = [name for name in chosen if name in mark.args]
        metafunc.parametrize("service", chosen, indirect=True, scope="session")


def load_service(name: str) -> type[Any]:
    """The class of a backend's service."""
    module, attribute = BACKENDS[name]
    return getattr(importlib.import_module(module), attribute)


@pytest.fixture(scope="session")
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A healthy service, shared by the session's tests: tests use keys of their own."""
    from services.service import ServiceError

    name = request.param
    endpoint = request.config.getoption("--endpoint")
    if endpoint:
        found = load_service(name).at(endpoint)
        found.ours = False
        yield found
        return
    service = load_service(name)()
    try:
        try:
            service.start(tmp_path_factory.mktemp(name))
        except ServiceError as error:
            if os.environ.get("LMCACHE_CORE_MATRIX"):
                raise
            pytest.skip(str(error))
        yield service
    finally:
        service.stop()


@pytest.fixture
def label(request: pytest.FixtureRequest) -> str:
    """A name of this test's own, for keys and folders on a shared service."""
    return f"{re.sub('[^a-z0-9]+', '-', request.node.name.lower())}-{os.urandom(4).hex()}"


@pytest.fixture
def world(node: Any, service: Service, label: str) -> Iterator[Callable[..., World]]:
    """Makes a server on the service, and a client; in the end nothing may be held."""
    from matrix_world import TIER, TIER_DEADLINE_S, World

    made: list[World] = []

    def make(settings: dict[str, object] | None = None, nbytes: int | None = None) -> World:
        options = service.tier_options(TIER, settings)
        options += [f"--l2.{TIER}.deadline_s", str(TIER_DEADLINE_S)]
        node.server = node.serve(*options)
        made.append(World(node.client(), label, *(() if nbytes is None else (nbytes,))))
        return made[-1]

    yield make
    if made and node.server.popen.poll() is None:  # a test may have ended it
        for one in made:
            one.account()


@pytest.fixture
def proxies(service: Service) -> Iterator[Proxies]:
    """Proxies in front of the service that behave, until they are told not to."""
    found = service.through() if service.ours else None
    if found is None:
        pytest.skip(f"{service.name} has no port of ours to stand in front of")
    yield found
    found.mend()
    if not found.kept:
        found.stop()


@pytest.fixture
def front_module() -> ModuleType:
    """See `_FRONT`."""
    spec = importlib.util.spec_from_file_location("s3_front", _FRONT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def front(service: S3Service, front_module: ModuleType) -> Iterator[Any]:
    front = front_module.Front(service.endpoint)
    yield front
    front.close()
