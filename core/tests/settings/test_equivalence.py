"""Whichever way settings are said, they are the same settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.compose import compose, compose_from
from lmcache_core.settings.sources import PREFIX

WORD = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)
FRACTION = st.floats(0.01, 1.0)
TREES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[a-z][a-z0-9_-]{0,20}", fullmatch=True),
        "chunk_tokens": st.integers(1, 4096),
        "drain_s": st.floats(0.1, 1e6),
        "l1": st.fixed_dictionaries(
            {},
            optional={
                "size_bytes": st.one_of(st.integers(0, 1 << 40), st.sampled_from(["8GiB", "512MiB", "3 KB"])),
                "backing": st.sampled_from(["shm", "memfd", "hugetlb"]),
                "watermark": FRACTION,
                "eviction": st.one_of(
                    st.sampled_from(["lru", "noop"]),
                    st.fixed_dictionaries({"type": st.just("ghostly")}, optional={"ghost": st.integers(0, 9)}),
                ),
            },
        ),
        "zmq": st.fixed_dictionaries({}, optional={"ipc": st.booleans()}),
        "l2": st.fixed_dictionaries(
            {},
            optional={
                "cold": st.fixed_dictionaries(
                    {"type": st.just("acme"), "bucket": WORD},
                    optional={
                        "token": st.text("0123456789abcdef", min_size=4, max_size=20),
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


def leaves(tree: dict[str, Any], at: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for name, value in tree.items():
        found += leaves(value, (*at, name)) if isinstance(value, dict) else [((*at, name), value)]
    return found


def text(value: Any) -> str:
    if isinstance(value, list):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)


def toml(tree: dict[str, Any]) -> str:
    """Dotted keys: a leaf a line. TOML writes these values as JSON does."""
    return "".join(f"{'.'.join(path)} = {json.dumps(value)}\n" for path, value in leaves(tree))


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("equivalence") / "lmcache.toml"


# too_slow looks at the clock, and a loaded machine is no fault of ours
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=TREES)
def test_flags_environment_file_and_values_give_the_same_settings(
    registry: Registry, file: Path, tree: dict[str, Any]
) -> None:
    flags = [f"--{'.'.join(path)}={text(value)}" for path, value in leaves(tree)]
    environ = {PREFIX + "__".join(path).upper(): text(value) for path, value in leaves(tree)}
    file.write_text(toml(tree))
    dumps = [
        composed.settings.model_dump()
        for composed in (
            compose(registry, flags, {}),
            compose(registry, [], environ),
            compose(registry, [], {}, file),
            compose_from(registry, tree),
        )
    ]
    assert dumps[0] == dumps[1] == dumps[2] == dumps[3]
