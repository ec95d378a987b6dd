"""The matrix: the same tests over every backend, each a real service.

`--backend NAME` (repeatable) says which; by default those whose programs are installed. With `LMCACHE_CORE_MATRIX=1`
a service that cannot start is a failure, not a skip. `--endpoint` names a service of your own instead of one that
the tests start: a Redis URL, an S3 endpoint, a directory.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The services are a package beside this file, and pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

# backend → (module, class). A module is imported when its backend is used: not everybody has boto3.
BACKENDS = {
    "disk": ("services.disk", "Disk"),
    "redis": ("services.redis_standalone", "RedisStandalone"),
    "redis-tls": ("services.redis_tls", "RedisTls"),
    "redis-sentinel": ("services.redis_sentinel", "RedisSentinel"),
    "redis-cluster": ("services.redis_cluster", "RedisCluster"),
    "s3-moto": ("services.moto", "Moto"),
    "s3-radosgw": ("services.radosgw", "RadosGateway"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("matrix")
    group.addoption("--backend", action="append", choices=sorted(BACKENDS), help="a backend to test; repeatable")
    group.addoption("--endpoint", help="a service of your own to test, with exactly one --backend")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of `service` runs once for each backend that was asked for."""
    if "service" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--backend") or ["disk", "redis"]
        metafunc.parametrize("service", chosen, indirect=True, scope="session")


def load_service(name: str) -> Any:
    """The class of a backend's service."""
    module, attribute = BACKENDS[name]
    return getattr(importlib.import_module(module), attribute)


@pytest.fixture(scope="session")
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A healthy service, shared by the session's tests: tests use keys of their own."""
    from services.service import ServiceError

    name = request.param
    endpoint = request.config.getoption("--endpoint")
    if endpoint:
        yield load_service(name).at(endpoint)
        return
    service = load_service(name)()
    try:
        service.start(tmp_path_factory.mktemp(name))
    except ServiceError as error:
        service.stop()
        if os.environ.get("LMCACHE_CORE_MATRIX"):
            raise
        pytest.skip(str(error))
    try:
        yield service
    finally:
        service.stop()
