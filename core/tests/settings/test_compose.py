"""Settings from flags, environment and file: precedence, origins, tiers, components."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from lmcache_core import limits
from lmcache_core.errors import PluginError, SettingsError
from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.compose import compose, compose_from, make_settings
from lmcache_core.settings.model import Settings
from lmcache_core.settings.sources import Origin

Toml = Callable[[str], Path]

BUCKET_BY = {
    "flag": (["--l2.cold.type", "acme", "--l2.cold.bucket", "b"], {}, ""),
    "flag with =": (["--l2.cold.type=acme", "--l2.cold.bucket=b"], {}, ""),
    "environment": ([], {"LMCACHE_CORE_L2__COLD__TYPE": "acme", "LMCACHE_CORE_L2__COLD__BUCKET": "b"}, ""),
    "file": ([], {}, '[l2.cold]\ntype = "acme"\nbucket = "b"\n'),
}


@pytest.mark.parametrize("way", BUCKET_BY)
def test_a_tier_can_be_configured_by_flags_environment_and_file(registry: Registry, toml: Toml, way: str) -> None:
    flags, environ, file = BUCKET_BY[way]
    composed = compose(registry, flags, environ, toml(file))
    tier = composed.settings.l2["cold"]
    assert (tier.type, tier.settings.bucket) == ("acme", "b")
    assert composed.origins["l2.cold.bucket"].origin == way.split()[0]


def test_flag_beats_environment_beats_file_beats_default(registry: Registry, toml: Toml) -> None:
    file = toml("chunk_tokens = 1\n[l1]\nwatermark = 0.1\nevict_ratio = 0.1\n")
    environ = {"LMCACHE_CORE_L1__WATERMARK": "0.2", "LMCACHE_CORE_L1__EVICT_RATIO": "0.2"}
    composed = compose(registry, ["--l1.evict_ratio=0.3"], environ, file)
    settings, origins = composed.settings, composed.origins
    assert (settings.chunk_tokens, settings.l1.watermark, settings.l1.evict_ratio) == (1, 0.2, 0.3)
    assert settings.l1.backing == "shm"
    assert origins["chunk_tokens"] == (Origin.FILE, str(file))
    assert origins["l1.watermark"] == (Origin.ENVIRONMENT, "LMCACHE_CORE_L1__WATERMARK")
    assert origins["l1.evict_ratio"] == (Origin.FLAG, "--l1.evict_ratio")
    assert origins["l1.backing"] == (Origin.DEFAULT, "")


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_a_list_within_a_table_of_names_is_read_as_json(registry: Registry, toml: Toml, way: str) -> None:
    said = '["aa", "bb"]'
    flags = ["--quotas.acme.namespaces", said] if way == "flag" else []
    environ = {"LMCACHE_CORE_QUOTAS__ACME__NAMESPACES": said} if way == "environment" else {}
    composed = compose(registry, flags, environ, toml("[quotas.acme.stores.l1]\nlimit_bytes = 4096\n"))
    assert len(composed.settings.quotas["acme"].namespaces) == 2


def test_a_text_within_a_table_of_texts_stays_a_text(registry: Registry, toml: Toml) -> None:
    composed = compose(registry, ["--follow.headers.token", "[1]"], {}, toml(""))
    assert composed.settings.tracers()["follow"].headers["token"].get_secret_value() == "[1]"


def test_a_list_within_a_table_that_is_cut_short_names_the_flag(registry: Registry, toml: Toml) -> None:
    with pytest.raises(SettingsError, match=r"--quotas\.acme\.namespaces.*looks like JSON and cannot be parsed"):
        compose(registry, ["--quotas.acme.namespaces", '["aa"'], {}, toml(""))


def test_every_setting_has_an_origin(registry: Registry) -> None:
    composed = compose_from(registry, {"l2": {"cold": {"type": "acme", "bucket": "b"}}})
    assert {".".join(path) for path in composed.schema} == set(composed.origins)
    assert composed.origins["l2.cold.retry.attempts"].origin is Origin.DEFAULT
    assert composed.origins["l2.cold.bucket"].origin is Origin.GIVEN


def test_a_tier_may_be_spread_over_all_places(registry: Registry, toml: Toml) -> None:
    composed = compose(
        registry,
        ["--l2.cold.region", "south"],
        {"LMCACHE_CORE_L2__COLD__TOKEN": "12345", "LMCACHE_CORE_L2__COLD__RETRY__ATTEMPTS": "7"},
        toml('[l2.cold]\ntype = "acme"\nbucket = "b"\ncapacity_bytes = "2GiB"\n[l2.cold.retry]\npause_s = 2\n'),
    )
    tier = composed.settings.l2["cold"]
    assert tier.capacity_bytes == 2 << 30
    assert tier.settings.region == "south"
    assert tier.settings.token == SecretStr("12345")
    assert (tier.settings.retry.attempts, tier.settings.retry.pause_s) == (7, 2.0)


def test_lists_are_read_from_commas_and_from_json(registry: Registry) -> None:
    for text in ("a:1,b:2", "a:1, b:2", '["a:1", "b:2"]'):
        flags = ["--l2.cold.type=acme", "--l2.cold.bucket=b", f"--l2.cold.hosts={text}"]
        assert compose(registry, flags, {}).settings.l2["cold"].settings.hosts == ("a:1", "b:2")


def test_a_switch_needs_no_value_and_hyphens_are_underscores(registry: Registry) -> None:
    settings = compose(registry, ["--zmq.ipc", "--l1.evict-ratio", "0.5"], {}).settings
    assert settings.zmq.ipc is True
    assert settings.l1.evict_ratio == 0.5
    assert compose(registry, ["--zmq.ipc", "/run/x"], {}).settings.zmq.ipc == Path("/run/x")
    assert compose(registry, [], {"LMCACHE_CORE_ZMQ__IPC": "off"}).settings.zmq.ipc is False


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8GiB", 8 << 30), ("512MiB", 512 << 20), ("4096", 4096), ("1.5 MB", 1_500_000)]
)
def test_sizes_are_read_as_people_write_them(registry: Registry, text: str, nbytes: int) -> None:
    assert compose(registry, ["--l1.size_bytes", text], {}).settings.l1.size_bytes == nbytes
    assert make_settings(registry, l1={"size_bytes": nbytes}).l1.size_bytes == nbytes


# --- components ---------------------------------------------------------------------------------------------


def test_a_policy_is_a_name_or_a_table(registry: Registry, toml: Toml) -> None:
    assert compose(registry, [], {}, toml('[l1]\neviction = "ghostly"\n')).settings.l1.eviction.settings.ghost == 3
    table = '[l1.eviction]\ntype = "ghostly"\nghost = 9\ntenants = {a = 1}\n'
    eviction = compose(registry, [], {}, toml(table)).settings.l1.eviction
    assert (eviction.type, eviction.settings.ghost, eviction.settings.tenants) == ("ghostly", 9, {"a": 1})


def test_settings_of_the_same_policy_are_merged_from_all_places(registry: Registry, toml: Toml) -> None:
    composed = compose(
        registry, ["--l1.eviction.ghost=5"], {"LMCACHE_CORE_L1__EVICTION": "ghostly"}, toml('l1.eviction = "lru"\n')
    )
    assert composed.settings.l1.eviction.settings.ghost == 5
    assert composed.origins["l1.eviction"].origin is Origin.ENVIRONMENT
    assert composed.origins["l1.eviction.ghost"].origin is Origin.FLAG


def test_another_policy_replaces_the_table_of_the_one_in_the_file(registry: Registry, toml: Toml) -> None:
    file = toml('[l1.eviction]\ntype = "ghostly"\nghost = 9\n')
    assert compose(registry, ["--l1.eviction", "lru"], {}, file).settings.l1.eviction.settings is None
    spooky = compose(registry, [], {"LMCACHE_CORE_L1__EVICTION__TYPE": "spooky"}, file).settings.l1.eviction
    assert (spooky.type, spooky.settings.ghost) == ("spooky", 3)


def test_a_serde_chain_is_a_list_of_names_and_tables_in_order(registry: Registry, toml: Toml) -> None:
    text = '[l2.cold]\ntype = "plain"\nserde = ["identity", {type = "squeeze", level = 4}, "squeeze"]\n'
    chain = compose(registry, [], {}, toml(text)).settings.l2["cold"].serde
    assert [link.type for link in chain] == ["identity", "squeeze", "squeeze"]
    assert [link.settings and link.settings.level for link in chain] == [None, 4, 1]
    flags = ["--l2.cold.type", "plain", "--l2.cold.serde", "identity,squeeze"]
    assert [link.type for link in compose(registry, flags, {}).settings.l2["cold"].serde] == ["identity", "squeeze"]
    flags[-1] = '[{"type": "squeeze", "level": 6}]'
    assert compose(registry, flags, {}).settings.l2["cold"].serde[0].settings.level == 6


def test_a_tier_may_have_no_eviction(registry: Registry) -> None:
    for none in ("none", None):
        assert make_settings(registry, l2={"a": {"type": "plain", "eviction": none}}).l2["a"].eviction is None
    flags = ["--l2.a.type=plain", "--l2.a.eviction=none"]
    assert compose(registry, flags, {}).settings.l2["a"].eviction is None
    lru = make_settings(registry, l2={"a": {"type": "plain"}}).l2["a"].eviction
    assert lru is not None
    assert lru.type == "lru"


def test_every_component_that_is_named_is_listed(registry: Registry) -> None:
    settings = make_settings(registry, l2={"a": {"type": "plain", "serde": ["squeeze"], "eviction": "ghostly"}})
    assert [(str(kind), name) for kind, name in settings.components()] == [
        ("eviction_policy", "lru"),
        ("store_policy", "default"),
        ("prefetch_policy", "default"),
        ("l2_adapter", "plain"),
        ("eviction_policy", "ghostly"),
        ("serde", "squeeze"),
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"l1": {"eviction": "gone"}},
        {"store_policy": "gone"},
        {"prefetch_policy": {"type": "gone"}},
        {"l2": {"a": {"type": "gone"}}},
        {"l2": {"a": {"type": "plain", "serde": ["gone"]}}},
        {"l2": {"a": {"type": "plain", "eviction": "gone"}}},
    ],
)
def test_a_component_that_is_not_there_is_a_plugin_error(registry: Registry, values: dict[str, object]) -> None:
    with pytest.raises(PluginError, match="'gone'"):
        compose_from(registry, values)


# --- tiers and their order ----------------------------------------------------------------------------------


def test_tiers_stand_in_the_order_of_the_file(registry: Registry, toml: Toml) -> None:
    text = "".join(f'[l2.{name}]\ntype = "plain"\n' for name in ("zoo", "ant", "mid"))
    assert list(compose(registry, [], {}, toml(text)).settings.l2) == ["zoo", "ant", "mid"]
    ordered = compose(registry, ["--l2_order", "mid,zoo,ant"], {}, toml(text)).settings
    assert list(ordered.l2) == ["mid", "zoo", "ant"]


def test_two_tiers_that_only_the_environment_names_need_an_order(registry: Registry) -> None:
    environ = {"LMCACHE_CORE_L2__B__TYPE": "plain", "LMCACHE_CORE_L2__A__TYPE": "plain"}
    with pytest.raises(SettingsError, match="LMCACHE_CORE_L2_ORDER"):
        compose(registry, [], environ)
    settings = compose(registry, [], {**environ, "LMCACHE_CORE_L2_ORDER": "b,a"}).settings
    assert list(settings.l2) == ["b", "a"]


def test_one_tier_of_the_environment_comes_after_those_of_the_file(registry: Registry, toml: Toml) -> None:
    environ = {"LMCACHE_CORE_L2__A__TYPE": "plain"}
    assert list(compose(registry, [], environ, toml('[l2.b]\ntype = "plain"\n')).settings.l2) == ["b", "a"]


@pytest.mark.parametrize(
    ("order", "said"), [("cold,ssd,x", "'x'"), ("cold", "'ssd'"), ("cold,ssd,cold", "twice"), ("cool,ssd", "'cold'")]
)
def test_an_order_that_is_not_that_of_the_tiers_is_refused(registry: Registry, order: str, said: str) -> None:
    tiers = {"ssd": {"type": "plain"}, "cold": {"type": "plain"}}
    with pytest.raises(SettingsError, match=said):
        make_settings(registry, l2=tiers, l2_order=order.split(","))


@pytest.mark.parametrize("name", ["Cold", "my-ssd", "_x", "x_", "a__b", "1st"])
def test_a_tier_name_that_the_environment_could_not_spell_is_refused(registry: Registry, name: str) -> None:
    with pytest.raises(SettingsError, match="not a tier name"):
        make_settings(registry, l2={name: {"type": "plain"}})


def test_a_tier_name_has_a_length_limit(registry: Registry) -> None:
    longest = "a" * limits.TIER_NAME_CHARS_MAX
    assert make_settings(registry, l2={longest: {"type": "plain"}}).l2[longest].type == "plain"
    with pytest.raises(SettingsError, match="not a tier name: it has 65 of at most 64 characters"):
        make_settings(registry, l2={longest + "a": {"type": "plain"}})


@pytest.mark.parametrize("name", ["copy", "json", "items", "model_fields", "schema", "type", "adapter"])
def test_a_tier_may_have_any_name_that_matches(registry: Registry, name: str) -> None:
    assert make_settings(registry, l2={name: {"type": "plain"}}).l2[name].type == "plain"


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--l1.watermark", "7"], r"l1\.watermark \(--l1\.watermark\): must be less than or equal to 1$"),
        (["--drain_s", "minus"], r"drain_s \(--drain_s\): must be a valid number$"),
        (["--l1.keep_pool", "maybe"], r"l1\.keep_pool .*: must be a valid boolean$"),
        (["--l1.size_bytes", "8 gigs"], r"l1\.size_bytes .*'8 gigs' is not a size"),
        (["--l1.backing", "disk"], r"l1\.backing .*'shm', 'memfd', 'hugetlb' or 'file'"),
        (["--name", "No Good"], r"name .*lower-case letters"),
        (["--zmq.tcp", "0.0.0.0:5555"], "requires CURVE"),
        (["--zmq.tcp", "5555"], "not an address"),
        (["--l1.access", "group"], "set gids"),
        (["--l1.gids", "5"], 'set access = "group"'),
        (["--l2.cold.bucket", "b"], r"'cold' has no type.*set l2\.cold\.type"),
        (["--l2.cold.type", "acme"], r"l2\.cold\.bucket is missing.*--l2\.cold\.bucket.*LMCACHE_CORE_L2__COLD__BUCKET"),
        (["--l2.cold.type", "plain", "--l2.cold.serde", '[{"type": "squeeze", "level": "x"}]'], r"serde\.0\.level"),
        (["--l2.cold.type", "plain", "--l2.cold.serde", "[oops"], "looks like JSON"),
        (["--l1", "8GiB"], "is a table"),
        (["--l2.cold", "plain"], r"is a table: set l2\.cold\.type"),
        (["--chunk_tokens", "1", "--chunk-tokens", "2"], "twice"),
        (["8GiB"], "not a setting"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_and_place(registry: Registry, flags: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        compose(registry, flags, {})


def test_all_problems_are_said_at_once(registry: Registry) -> None:
    with pytest.raises(SettingsError, match=r"l1\.watermark.*chunk_tokens"):
        compose(registry, ["--l1.watermark", "7", "--chunk_tokens", "0"], {})


def test_a_file_that_is_missing_or_no_toml_is_named(registry: Registry, toml: Toml, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml cannot be read"):
        compose(registry, [], {}, tmp_path / "absent.toml")
    with pytest.raises(SettingsError, match=r"lmcache\.toml is not valid TOML"):
        compose(registry, [], {}, toml("l1 = ["))


def test_settings_are_frozen_through_and_through(registry: Registry) -> None:
    settings = make_settings(registry, l2={"a": {"type": "acme", "bucket": "b"}})
    with pytest.raises(ValidationError):
        settings.name = "x"
    with pytest.raises(ValidationError):
        settings.l2["a"].settings.bucket = "x"
    with pytest.raises(TypeError):
        settings.l2["b"] = settings.l2["a"]  # type: ignore[index]  # that it is refused is the claim
    assert isinstance(settings, Settings)


def test_a_program_s_own_values_need_no_environment_and_no_file(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LMCACHE_CORE_CHUNK_TOKENS", "1")
    monkeypatch.chdir(tmp_path)
    Path("lmcache.toml").write_text("chunk_tokens = 2\n")
    settings = make_settings(registry, name="mine", l1={"size_bytes": "64MiB"}, l2={"disk": {"type": "plain"}})
    assert (settings.name, settings.chunk_tokens, settings.l1.size_bytes) == ("mine", 256, 64 << 20)


def test_a_command_line_keeps_its_commas_wherever_it_comes_from(registry: Registry) -> None:
    wanted = ("python", "-c", "import os, sys; print(os, sys)")
    line = "python -c 'import os, sys; print(os, sys)'"
    for arguments, environ in (
        ([f"--helpers.one.command={line}"], {}),
        ([], {"LMCACHE_CORE_HELPERS__ONE__COMMAND": line}),
        ([], {"LMCACHE_CORE_HELPERS__ONE__COMMAND": '["python", "-c", "import os, sys; print(os, sys)"]'}),
    ):
        assert compose(registry, arguments, environ).settings.helpers["one"].command == wanted
