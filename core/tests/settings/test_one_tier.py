"""The settings of a tier that comes or changes while the server runs: the same models, and the same silence."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from lmcache_core.errors import PluginError, SettingsError
from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.compose import make_settings
from lmcache_core.settings.tier import same_but_for_figures, tier_settings, values_of

SECRET = "hunter2-hunter2"
VALUES: dict[str, object] = {
    "type": "acme", "bucket": "b", "token": SECRET, "retry": {"attempts": 7}, "hosts": ["x", "y"],
    "eviction": {"type": "ghostly", "ghost": 9, "tenants": {"a": 1}},
    "serde": ["identity", {"type": "squeeze", "level": 3, "secret": SECRET}],
}  # fmt: skip


def test_what_is_not_named_stays_secrets_and_chains_among_it(registry: Registry) -> None:
    before = tier_settings(registry, "cold", VALUES, {})
    after = tier_settings(registry, "cold", {}, {"capacity_bytes": "2GiB", "retry.pause_s": "0.25"}, before)
    assert after.capacity_bytes == 2 << 30
    assert (after.settings.retry.attempts, after.settings.retry.pause_s) == (7, 0.25)
    assert after.settings.token.get_secret_value() == SECRET
    assert after.settings.hosts == ("x", "y")
    assert after.eviction.settings.tenants == {"a": 1}
    assert [each.type for each in after.serde] == ["identity", "squeeze"]
    assert after.serde[1].settings.secret.get_secret_value() == SECRET
    assert tier_settings(registry, "cold", values_of(after), {}).model_dump() == after.model_dump()


def test_another_type_leaves_nothing_of_the_former_adapter(registry: Registry) -> None:
    before = tier_settings(registry, "cold", VALUES | {"capacity_bytes": "1GiB"}, {})
    after = tier_settings(registry, "cold", {}, {"type": "plain"}, before)
    assert (after.type, after.capacity_bytes, after.settings) == ("plain", 1 << 30, None)


def test_only_figures_change_in_place(registry: Registry) -> None:
    before = tier_settings(registry, "cold", VALUES, {})
    for texts, in_place in (
        ({"capacity_bytes": "1GiB", "deadline_s": "3"}, True),
        ({"rescan_s": "60"}, True),
        ({"token": "another secret"}, False),
        ({"connections": "9"}, False),
        ({"eviction": "lru"}, False),
    ):
        after = tier_settings(registry, "cold", {}, texts, before)
        assert same_but_for_figures(before, after) is in_place, texts


@pytest.mark.parametrize(
    ("values", "texts", "error"),
    [
        ({}, {}, SettingsError),
        ({"type": "acme"}, {}, SettingsError),
        ({"type": "acme", "bucket": "b", "bukcet": "c"}, {}, SettingsError),
        ({"type": "acme", "bucket": "b"}, {"token": "hsh"}, SettingsError),
        ({"type": "acme", "bucket": "b"}, {"": "x"}, SettingsError),
        ({"type": "acme", "bucket": "b"}, {"watermark": "7"}, SettingsError),
        ({"type": "nobody"}, {}, PluginError),
    ],
)
def test_what_is_wrong_is_refused_without_showing_a_secret(
    registry: Registry, values: Any, texts: Any, error: Any
) -> None:
    with pytest.raises(error) as caught:
        tier_settings(registry, "cold", values, texts)
    assert "hsh" not in str(caught.value)


def test_a_tiers_own_settings_have_the_name_that_those_of_a_policy_have(registry: Registry) -> None:
    tier = make_settings(registry, l2={"cold": {"type": "acme", "bucket": "b"}}).l2["cold"]
    assert tier.settings.bucket == "b"


def classes() -> int:
    return sum(isinstance(each, type) for each in gc.get_objects())


def test_changes_make_no_classes_which_a_server_would_never_collect(registry: Registry) -> None:
    settings = tier_settings(registry, "cold", VALUES, {})
    settings = tier_settings(registry, "cold", {}, {"deadline_s": "3"}, settings)
    gc.collect()
    gc.disable()
    try:
        before = classes()
        for seconds in range(1, 6):
            settings = tier_settings(registry, "cold", {}, {"deadline_s": str(seconds)}, settings)
            with pytest.raises(SettingsError):
                tier_settings(registry, "cold", {}, {"deadline_s": "soon"}, settings)
        assert classes() == before
    finally:
        gc.enable()
    assert settings.deadline_s == 5
    assert type(tier_settings(registry, "warm", VALUES, {})) is type(settings)
