"""The registry: one door in, components by kind and name, hooks that cannot hurt each other."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from lmcache_core.errors import PluginError, UsageError
from lmcache_core.observe.subscriber import EventSubscriber, SubscriberContext
from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.examine import hook_names
from lmcache_core.plugins.hookspecs import hookimpl
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.registry import TIER_FIELDS, Registry
from lmcache_core.settings.model import TierSettings


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BucketSettings(Frozen):
    bucket: str


class CollidingSettings(Frozen):
    connections: int = 1


class TypedSettings(Frozen):
    type: str = "x"


class LooseSettings(BaseModel):
    bucket: str = ""


class Built:
    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


def refuse_to_build(settings: object) -> None:
    raise UsageError("not with these settings")


def fall_over(settings: object) -> None:
    raise RuntimeError("fell over")


@pytest.fixture(autouse=True)
def _parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = types.ModuleType("parts")
    for part in (BucketSettings, CollidingSettings, TypedSettings, LooseSettings, Built, refuse_to_build, fall_over):
        setattr(parts, part.__name__, part)
    monkeypatch.setitem(sys.modules, "parts", parts)


class Offers:
    """A plugin made of the components it is given."""

    def __init__(self, *specs: ComponentSpec) -> None:
        self.specs = specs

    @hookimpl
    def lmcache_components(self) -> Sequence[ComponentSpec]:
        return self.specs


def registry_with(*specs: ComponentSpec) -> Registry:
    registry = load_plugins({"LMCACHE_CORE_PLUGINS": ""})
    registry.register(Offers(*specs), "acme", distribution="lmcache-acme", version="1.5")
    return registry


def test_an_adapter_is_built_from_its_settings_and_context() -> None:
    registry = registry_with(ComponentSpec(Kind.L2_ADAPTER, "acme", "parts:Built", "parts:BucketSettings"))
    context = object()
    built = registry.build(Kind.L2_ADAPTER, "acme", {"bucket": "b"}, context)
    assert built.arguments == (BucketSettings(bucket="b"), context)


def test_everything_else_is_built_from_its_settings_alone() -> None:
    registry = registry_with(
        ComponentSpec(Kind.SERDE, "acme", "parts:Built", "parts:BucketSettings"),
        ComponentSpec(Kind.SERDE, "plain", "parts:Built"),
    )
    settings = BucketSettings(bucket="b")
    assert registry.build(Kind.SERDE, "acme", settings).arguments == (settings,)
    assert registry.build(Kind.SERDE, "plain").arguments == (None,)


def test_every_built_in_is_importable_and_can_be_built(tmp_path: Path) -> None:
    registry = load_plugins({"LMCACHE_CORE_PLUGINS": ""})
    contexts = {Kind.EVENT_SUBSCRIBER: SubscriberContext("node", tmp_path)}
    built = [
        registry.build(spec.kind, spec.name, None, contexts.get(kind))
        for kind in Kind
        for spec in registry.components(kind)
    ]
    assert len(built) == 10
    for each in built:
        if isinstance(each, EventSubscriber):
            each.close()


def test_an_unknown_name_says_what_was_meant_and_what_to_install() -> None:
    registry = load_plugins({"LMCACHE_CORE_PLUGINS": ""})
    with pytest.raises(PluginError, match="did you mean 'lru'"):
        registry.spec(Kind.EVICTION_POLICY, "lur")
    with pytest.raises(PluginError, match="pip install lmcache-redis"):
        Registry().spec(Kind.L2_ADAPTER, "redis")  # as where no plugin is installed at all
    with pytest.raises(PluginError, match="pip install lmcache-kv-events"):
        Registry().spec(Kind.EVENT_SUBSCRIBER, "kv_events")


def test_a_missing_backend_library_is_an_error_that_names_plugin_and_version() -> None:
    registry = registry_with(ComponentSpec(Kind.L2_ADAPTER, "acme", "no_such_backend:Adapter"))
    with pytest.raises(PluginError, match=r"acme.*\(lmcache-acme 1\.5\).*no_such_backend") as caught:
        registry.build(Kind.L2_ADAPTER, "acme")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_factory_that_falls_over_is_named_and_an_error_of_ours_passes_as_it_is() -> None:
    registry = registry_with(
        ComponentSpec(Kind.SERDE, "falls", "parts:fall_over"),
        ComponentSpec(Kind.SERDE, "refuses", "parts:refuse_to_build"),
    )
    with pytest.raises(PluginError, match=r"lmcache-acme 1\.5.*RuntimeError: fell over"):
        registry.build(Kind.SERDE, "falls")
    with pytest.raises(UsageError, match="not with these settings"):
        registry.build(Kind.SERDE, "refuses")


@pytest.mark.parametrize(
    ("kind", "model", "said"),
    [
        (Kind.L2_ADAPTER, "CollidingSettings", "field 'connections'"),
        (Kind.SERDE, "TypedSettings", "field 'type'"),
        (Kind.SERDE, "LooseSettings", "frozen and forbid"),
        (Kind.SERDE, "Built", "not a pydantic model"),
        (Kind.SERDE, "Absent", "could not be imported"),
    ],
)
def test_a_settings_model_that_cannot_stand_in_our_table_is_refused(kind: Kind, model: str, said: str) -> None:
    registry = registry_with(ComponentSpec(kind, "acme", "parts:Built", f"parts:{model}"))
    with pytest.raises(PluginError, match=said):
        registry.settings_model(kind, "acme")


def test_the_reserved_field_names_are_those_of_a_tier() -> None:
    assert set(TierSettings.model_fields) == TIER_FIELDS


def test_a_closed_registry_refuses_plugins() -> None:
    registry = load_plugins({"LMCACHE_CORE_PLUGINS": ""})
    registry.close()
    registry.close()
    with pytest.raises(PluginError, match="too late"):
        registry.register(Offers(), "late")
    assert [record.name for record in registry.plugins] == ["builtin"]


def test_a_second_owner_of_a_name_or_component_is_refused_at_the_door() -> None:
    registry = registry_with(ComponentSpec(Kind.SERDE, "acme", "parts:Built"))
    with pytest.raises(PluginError, match="taken by acme"):
        registry.register(Offers(), "acme")
    with pytest.raises(PluginError, match=r"acme \(lmcache-acme 1\.5\) has the serde 'acme'"):
        registry.register(Offers(ComponentSpec(Kind.SERDE, "acme", "parts:Built")), "other")
    assert registry.owner(Kind.SERDE, "acme").name == "acme"


class Recorder:
    """Implements every hook that is called after loading, and notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    @hookimpl
    def lmcache_check(self, settings: object) -> Sequence[str]:
        self.calls.append(("lmcache_check", settings))
        return ["looked"]

    @hookimpl
    def lmcache_add_commands(self, subparsers: object, benches: object) -> None:
        self.calls.append(("lmcache_add_commands", (subparsers, benches)))

    @hookimpl
    def lmcache_started(self, address: str, settings: object) -> None:
        self.calls.append(("lmcache_started", (settings, address)))

    @hookimpl
    def lmcache_stopping(self) -> None:
        self.calls.append(("lmcache_stopping", None))


class Context:
    @hookimpl
    def lmcache_trace_context(self) -> Callable[[], str]:
        return lambda: "here"


def test_a_plugin_says_which_trace_is_current() -> None:
    registry = Registry()
    registry.register(Recorder(), "a_none")
    registry.register(Context(), "context")
    [found] = registry.hook.lmcache_trace_context()
    assert found() == "here"


class Panic(BaseException):
    """What a library in Rust raises when it panics."""


class Thrower:
    """Raises in every hook that is called after loading."""

    @hookimpl
    def lmcache_check(self) -> None:
        raise ValueError("in check")

    @hookimpl
    def lmcache_add_commands(self) -> None:
        raise ValueError("in add_commands")

    @hookimpl
    def lmcache_started(self) -> None:
        raise SystemExit(1)

    @hookimpl
    def lmcache_stopping(self) -> None:
        raise Panic("in stopping")


def test_a_plugin_that_raises_in_every_hook_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    first, last = Recorder(), Recorder()
    registry.register(first, "a_first")
    registry.register(Thrower(), "thrower", distribution="lmcache-thrower", version="0.9")
    registry.register(last, "z_last")
    assert registry.hook.lmcache_check(settings="s") == [["looked"], ["looked"]]
    registry.hook.lmcache_add_commands(subparsers=1, benches=2)
    registry.hook.lmcache_started(settings="s", address="here")
    registry.hook.lmcache_stopping()
    expected = [
        ("lmcache_check", "s"),
        ("lmcache_add_commands", (1, 2)),
        ("lmcache_started", ("s", "here")),
        ("lmcache_stopping", None),
    ]
    assert first.calls == last.calls == expected
    assert [fault.hook for fault in registry.faults] == [hook for hook, _ in expected]
    assert all("thrower (lmcache-thrower 0.9)" in str(fault) for fault in registry.faults)
    assert "in stopping" in caplog.text


def test_a_hook_can_be_called_of_some_plugins_only() -> None:
    registry = Registry()
    asked, spared = Recorder(), Recorder()
    registry.register(asked, "asked")
    registry.register(spared, "spared")
    registry.call("lmcache_check", {"asked"}, settings=None)
    assert asked.calls
    assert not spared.calls


def test_an_unknown_hook_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(AttributeError, match="did you mean 'lmcache_started'"):
        _ = Registry().hook.lmcache_start
    assert "lmcache_started" in hook_names()
