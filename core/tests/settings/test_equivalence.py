"""Whichever way settings are said, they are the same settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.compose import Composed, compose, compose_from
from lmcache_core.settings.files import PREFIX

WORD = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)
FRACTION = st.floats(0.01, 1.0)
# what people's passwords are made of: what a shell, a .env file, YAML and TOML give a meaning to
PASSWORD = st.text(st.sampled_from("aZ09 #$%&{}[]()<>=:;,.!?*+-_/\\|~^@'\"`äß€"), min_size=4, max_size=20).filter(
    lambda text: text == text.strip()
)
TREES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[a-z][a-z0-9_-]{0,20}", fullmatch=True),
        "chunk_tokens": st.integers(1, 4096),
        "drain_s": st.floats(0.1, 1e6),
        "runtime_dir": st.sampled_from(["/run/x", "~/x"]),
        "l1": st.fixed_dictionaries(
            {},
            optional={
                "size_bytes": st.one_of(st.integers(0, 1 << 40), st.sampled_from(["8GiB", "512MiB", "3 KB"])),
                "backing": st.sampled_from(["shm", "memfd", "hugetlb"]),
                "watermark": FRACTION,
                "eviction": st.one_of(
                    st.sampled_from(["lru", "noop"]),
                    st.fixed_dictionaries(
                        {"type": st.just("ghostly")},
                        optional={
                            "ghost": st.integers(0, 9),
                            "tenants": st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.integers(0, 9)),
                        },
                    ),
                ),
            },
        ),
        "zmq": st.fixed_dictionaries({}, optional={"ipc": st.booleans()}),
        "follow": st.fixed_dictionaries({"headers": st.dictionaries(st.just("token"), PASSWORD, min_size=1)}),
        "quotas": st.dictionaries(
            st.sampled_from(["acme", "other"]),
            st.fixed_dictionaries(
                {"namespaces": st.lists(st.from_regex(r"[0-9a-f]{1,16}", fullmatch=True), min_size=1, max_size=3)},
                optional={"stores": st.just({"l1": {"limit_bytes": 4096}})},
            ),
        ),
        "l2": st.fixed_dictionaries(
            {},
            optional={
                "cold": st.fixed_dictionaries(
                    {"type": st.just("acme"), "bucket": WORD},
                    optional={
                        "token": PASSWORD,
                        "hosts": st.lists(WORD, max_size=3),
                        "verify": st.booleans(),
                        "region": st.sampled_from(["north", "south"]),
                        "retry": st.fixed_dictionaries({}, optional={"attempts": st.integers(0, 99)}),
                        "capacity_bytes": st.integers(0, 1 << 50),
                        "serde": st.lists(st.sampled_from(["identity", "squeeze"]), max_size=3),
                        "eviction": st.sampled_from(["none", "lru", "ghostly"]),
                    },
                )
            },
        ),
    },
)

Tree = dict[str, Any]
Ways = dict[str, Callable[[Registry, Tree, Path], Composed]]


def leaves(tree: Tree, at: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for name, value in tree.items():
        found += leaves(value, (*at, name)) if isinstance(value, dict) and value else [((*at, name), value)]
    return [(path, value) for path, value in found if value != {}]  # in a variable, an empty table is no table


def text(value: object) -> str:
    if isinstance(value, list):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)


def variables(tree: Tree) -> dict[str, str]:
    return {PREFIX + "__".join(path).upper(): text(value) for path, value in leaves(tree)}


def quoted(value: str) -> str:
    """As a .env file has it."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def by_flags(registry: Registry, tree: Tree, folder: Path) -> Composed:
    return compose(registry, [f"--{'.'.join(path)}={text(value)}" for path, value in leaves(tree)], {})


def by_environment(registry: Registry, tree: Tree, folder: Path) -> Composed:
    return compose(registry, [], variables(tree))


def by_env_file(registry: Registry, tree: Tree, folder: Path) -> Composed:
    lines = [f"export {name}={quoted(value)}\n" for name, value in variables(tree).items()]
    (folder / "server.env").write_text("# of one server\n\nPATH=/bin\n" + "".join(lines))
    return compose(registry, [], {}, None, folder / "server.env")


def by_secrets(registry: Registry, tree: Tree, folder: Path, between: str = ".") -> Composed:
    """With the symbolic links that Kubernetes makes."""
    shutil.rmtree(folder / "mount", ignore_errors=True)
    data = folder / "mount" / "..2026_11_26"
    data.mkdir(parents=True)
    (folder / "mount" / "..data").symlink_to(data.name)
    for path, value in leaves(tree):
        file = data / between.join(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text(value) + "\n")
    for entry in data.iterdir():
        (folder / "mount" / entry.name).symlink_to(Path("..data", entry.name))
    return compose(registry, [f"--secrets-dir={folder / 'mount'}"], {})


def by_secrets_in_folders(registry: Registry, tree: Tree, folder: Path) -> Composed:
    return by_secrets(registry, tree, folder, between="/")


def by_secrets_named_as_variables(registry: Registry, tree: Tree, folder: Path) -> Composed:
    return by_secrets(registry, dict(variables(tree)), folder)


def by_toml(registry: Registry, tree: Tree, folder: Path) -> Composed:
    """Dotted keys: a leaf a line. TOML writes these values as JSON does."""
    lines = [f"{'.'.join(path)} = {json.dumps(value)}\n" for path, value in leaves(tree)]
    (folder / "lmcache.toml").write_text("".join(lines))
    return compose(registry, [], {}, folder / "lmcache.toml")


def by_yaml(registry: Registry, tree: Tree, folder: Path) -> Composed:
    (folder / "lmcache.yaml").write_text(yaml.safe_dump(tree, allow_unicode=True))
    return compose(registry, [], {}, folder / "lmcache.yaml")


def by_a_program(registry: Registry, tree: Tree, folder: Path) -> Composed:
    return compose_from(registry, tree)


WAYS = [
    *(by_flags, by_environment, by_env_file, by_secrets, by_secrets_in_folders, by_secrets_named_as_variables),
    *(by_toml, by_yaml, by_a_program),
]


def opened(value: Any) -> Any:
    """With secrets in clear text: all others look the same."""
    if hasattr(value, "get_secret_value"):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {name: opened(each) for name, each in value.items()}
    return [opened(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("equivalence")


# too_slow looks at the clock, and a loaded machine is no fault of ours
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=TREES)
def test_every_source_gives_the_same_settings(registry: Registry, folder: Path, tree: Tree) -> None:
    dumps = {way.__name__: opened(way(registry, tree, folder).settings.model_dump()) for way in WAYS}
    for dump in dumps.values():
        dump.pop("secrets_dir")
    for name, dump in dumps.items():
        assert dump == dumps["by_a_program"], name
