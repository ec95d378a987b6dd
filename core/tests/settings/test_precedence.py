"""Which source wins, for each pair of them, and where `config` says that a value came from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.compose import Composed, compose, make_settings
from lmcache_core.settings.present import HIDDEN, rows
from lmcache_core.settings.sources import Origin

STRONGEST_FIRST = [Origin.FLAG, Origin.ENVIRONMENT, Origin.ENV_FILE, Origin.SECRET, Origin.FILE]
VARIABLE = "LMCACHE_CORE_L2__COLD__BUCKET"


def composed(registry: Registry, folder: Path, buckets: Mapping[Origin, str], suffix: str = ".toml") -> Composed:
    """The bucket of one tier, said in some of the sources."""
    file, env_file, secrets = folder / f"lmcache{suffix}", folder / "server.env", folder / "secrets"
    secrets.mkdir(exist_ok=True)
    flags = ["--l2.cold.type=acme", f"--secrets_dir={secrets}"]
    file.write_text("")
    env_file.write_text("")
    environ = {"LMCACHE_CORE_ENV_FILE": str(env_file)}
    if Origin.FLAG in buckets:
        flags.append(f"--l2.cold.bucket={buckets[Origin.FLAG]}")
    if Origin.ENVIRONMENT in buckets:
        environ[VARIABLE] = buckets[Origin.ENVIRONMENT]
    if Origin.ENV_FILE in buckets:
        env_file.write_text(f"{VARIABLE}={buckets[Origin.ENV_FILE]}\n")
    if Origin.SECRET in buckets:
        (secrets / "l2.cold.bucket").write_text(buckets[Origin.SECRET])
    if Origin.FILE in buckets:
        named = buckets[Origin.FILE]
        file.write_text(
            f"[l2.cold]\nbucket = '{named}'\n" if suffix == ".toml" else f"l2: {{cold: {{bucket: {named}}}}}\n"
        )
    return compose(registry, flags, environ, file)


@pytest.mark.parametrize(("strong", "weak"), list(itertools.combinations(STRONGEST_FIRST, 2)))
def test_of_two_sources_the_stronger_one_wins(registry: Registry, tmp_path: Path, strong: Origin, weak: Origin) -> None:
    found = composed(registry, tmp_path, {strong: "strong", weak: "weak"})
    assert found.settings.l2["cold"].settings.bucket == "strong"
    assert found.origins["l2.cold.bucket"].origin is strong


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".YML"])
@pytest.mark.parametrize("origin", STRONGEST_FIRST)
def test_the_place_of_each_value_is_named(registry: Registry, tmp_path: Path, origin: Origin, suffix: str) -> None:
    where = {
        Origin.FLAG: "--l2.cold.bucket",
        Origin.ENVIRONMENT: VARIABLE,
        Origin.ENV_FILE: f"{VARIABLE} in {tmp_path / 'server.env'}",
        Origin.SECRET: str(tmp_path / "secrets/l2.cold.bucket"),
        Origin.FILE: str(tmp_path / f"lmcache{suffix}"),
    }
    found = composed(registry, tmp_path, {origin: "kv"}, suffix)
    assert found.origins["l2.cold.bucket"] == (origin, where[origin])
    assert found.origins["l2.cold.region"].origin is Origin.DEFAULT


def test_settings_of_one_table_come_from_all_sources_at_once(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "l2.cold.token").write_text("0012345\n")
    (tmp_path / "env").write_text("LMCACHE_CORE_L2__COLD__RETRY__ATTEMPTS=7\n")
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"secrets_dir: {tmp_path}\nl2:\n  cold:\n    type: acme\n    retry: {{pause_s: 2}}\n")
    found = compose(registry, ["--l2.cold.region", "south"], {VARIABLE: "b"}, file, tmp_path / "env")
    own = found.settings.l2["cold"].settings
    assert own.token.get_secret_value() == "0012345"
    assert (own.bucket, own.region, own.retry.attempts, own.retry.pause_s) == ("b", "south", 7, 2.0)


def test_of_several_directories_the_last_one_wins(registry: Registry, tmp_path: Path) -> None:
    for name, bucket in (("one", "first"), ("two", "second")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "l2.cold.bucket").write_text(bucket)
    both = f"{tmp_path / 'one'},{tmp_path / 'two'}"
    found = compose(registry, ["--l2.cold.type=acme"], {"LMCACHE_CORE_SECRETS_DIR": both})
    assert found.settings.l2["cold"].settings.bucket == "second"
    assert found.settings.secrets_dir == (tmp_path / "one", tmp_path / "two")


def test_a_program_names_a_directory_of_secrets_as_everybody_does(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "l2.cold.token").write_text("from-a-file")
    (tmp_path / "l2.cold.bucket").write_text("from-a-file")
    cold = {"type": "acme", "bucket": "from-the-program"}
    own = make_settings(registry, secrets_dir=[tmp_path], l2={"cold": cold}).l2["cold"].settings
    assert (own.token.get_secret_value(), own.bucket) == ("from-a-file", "from-the-program")


def test_what_a_secret_file_holds_is_hidden_whatever_its_type(registry: Registry, tmp_path: Path) -> None:
    found = composed(registry, tmp_path, {Origin.SECRET: "bucket-nobody-may-see"})
    row = next(row for row in rows(found) if row.name == "l2.cold.bucket")
    assert (row.value, row.text) == (HIDDEN, HIDDEN)


def test_an_empty_secret_leaves_the_weaker_source_in_force(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "runtime_dir").write_text("\n")
    file = tmp_path / "lmcache.toml"
    file.write_text(f"runtime_dir = '/run/x'\nsecrets_dir = '{tmp_path}'\n")
    assert compose(registry, [], {}, file).settings.runtime_dir == Path("/run/x")


def test_tiers_stand_in_the_order_of_the_env_file(registry: Registry, tmp_path: Path) -> None:
    lines = [f"LMCACHE_CORE_L2__{name}__TYPE=plain\n" for name in ("ZOO", "ANT")]
    (tmp_path / "env").write_text("".join(lines))
    assert list(compose(registry, [], {}, None, tmp_path / "env").settings.l2) == ["zoo", "ant"]


def test_a_table_of_yaml_without_lines_is_an_empty_one(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("l1:\n  # size_bytes: 1\nquotas:\nsubscribers:\n  log:\nl2:\n  a: {type: plain}\n")
    settings = compose(registry, [], {}, tmp_path / "a.yaml").settings
    assert (settings.l1.size_bytes, dict(settings.quotas), list(settings.subscribers)) == (1 << 30, {}, ["log"])


def test_a_home_is_expanded_where_no_shell_does(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "env").write_text("LMCACHE_CORE_CHUNK_TOKENS=7\n")
    (tmp_path / "name").write_text("mine\n")
    found = compose(registry, ["--secrets-dir=~"], {"LMCACHE_CORE_ENV_FILE": "~/env"})
    assert (found.settings.chunk_tokens, found.settings.name) == (7, "mine")
