from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lmcache_testing.embedded import Json

sys.path.insert(0, str(Path(__file__).parent))

from vllm_engines import ROPE, Engine, Server, save_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        why = pytest.mark.skip(reason="vLLM is not installed here: run these with `nox -s vllm`")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(why)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What vLLM warns of while it is imported is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "Llama", rope_parameters=ROPE)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Start an engine, which is killed at the end of the module."""
    folder = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:

        def engine(model: Path, connector: Json | None = None, **options: Any) -> Engine:
            made = Engine(model, connector, log=folder / str(len(list(folder.iterdir()))), **options)
            stack.callback(made.end)
            return made

        yield engine


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start a server, with further flags; it is gone at the end of the module."""
    with ExitStack() as stack:

        def server(*options: str) -> Server:
            made = Server(tmp_path_factory.mktemp("server"), *options)
            stack.callback(made.remove)
            return made.start()

        yield server
