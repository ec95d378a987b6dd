"""Misspelt names: errors where they are surely ours, warnings where they may be somebody's, nothing for Kubernetes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.errors import SettingsError
from lmcache_core.native import BUILD_VARIABLES, MODE_VARIABLE
from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.compose import compose

Toml = Callable[[str], Path]
COLD = {"LMCACHE_CORE_L2__COLD__TYPE": "acme", "LMCACHE_CORE_L2__COLD__BUCKET": "b"}


@pytest.mark.parametrize(
    ("flags", "environ", "file", "said"),
    [
        (["--l1.size_byte", "1"], {}, "", "--l1.size_byte is not a setting: did you mean '--l1.size_bytes'?"),
        (["--nme", "x"], {}, "", "--nme is not a setting: did you mean '--name'?"),
        ([], {}, "[l1]\nwatermrk = 0.5\n", "is not a setting: did you mean 'l1.watermark'?"),
        ([], {}, "[leese]\nwrite_ttl_s = 5\n", "did you mean 'lease.write_ttl_s'?"),
        ([], {}, '[l2.cold]\ntype = "acme"\nbuckt = "b"\n', "did you mean 'l2.cold.bucket'?"),
        (
            [],
            {},
            '[l2.cold]\ntype = "acme"\nbucket = "b"\nretry.atempts = 1\n',
            "did you mean 'l2.cold.retry.attempts'?",
        ),
        ([], {}, '[l1.eviction]\ntype = "ghostly"\ngohst = 1\n', "did you mean 'l1.eviction.ghost'?"),
        ([], {"LMCACHE_CORE_L1__BAKCING": "shm"}, "", "did you mean 'LMCACHE_CORE_L1__BACKING'?"),
        ([], {**COLD, "LMCACHE_CORE_L2__COLD__REGIN": "north"}, "", "did you mean 'LMCACHE_CORE_L2__COLD__REGION'?"),
        ([], {}, '[l2.cold]\ntype = "plain"\nbucket = "b"\n', "l2.cold.bucket"),
        (['--l1.eviction={"type": "ghostly", "gohst": 1}'], {}, "", "did you mean 'l1.eviction.ghost'?"),
    ],
)
def test_a_misspelt_name_is_an_error_with_what_was_meant(
    registry: Registry, toml: Toml, flags: list[str], environ: dict[str, str], file: str, said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        compose(registry, flags, environ, toml(file))
    assert said in str(caught.value)


def test_what_is_misspelt_in_a_codec_chain_is_not_mistaken_for_the_chain(registry: Registry, toml: Toml) -> None:
    file = '[l2.cold]\ntype = "acme"\nbucket = "b"\nserde = [{ type = "identity", levl = 1 }]\n'
    with pytest.raises(SettingsError, match=r"serde") as caught:
        compose(registry, [], {}, toml(file))
    assert "did you mean" not in str(caught.value)


def test_variables_of_ours_that_are_no_settings_are_no_warning(registry: Registry) -> None:
    ours = ("LMCACHE_CORE_PLUGINS", MODE_VARIABLE, *BUILD_VARIABLES)
    assert compose(registry, [], dict.fromkeys(ours, "off")).warnings == []
    assert compose(registry, [], {"LMCACHE_CORE_NATIV": "off"}).warnings


def test_an_unknown_variable_outside_our_sections_is_a_warning(registry: Registry) -> None:
    composed = compose(registry, [], {"LMCACHE_CORE_L1_SIZE": "1GiB", "LMCACHE_CORE_FOO": "1", "LMCACHE_FOO": "1"})
    assert composed.warnings == [
        "LMCACHE_CORE_FOO is not a setting and is ignored",
        "LMCACHE_CORE_L1_SIZE is not a setting and is ignored: did you mean 'LMCACHE_CORE_L1__SIZE_BYTES'?",
    ]


def test_a_variable_that_lacks_nothing_but_an_underscore_is_refused(registry: Registry) -> None:
    with pytest.raises(SettingsError, match="write LMCACHE_CORE_L1__SIZE_BYTES"):
        compose(registry, [], {"LMCACHE_CORE_L1_SIZE_BYTES": "1GiB"})


@pytest.mark.parametrize("service", ["", "L1_", "L2_", "L2__X_", "ZMQ_", "METRICS_", "NAME_"])
def test_what_kubernetes_injects_for_a_service_is_ignored(registry: Registry, service: str) -> None:
    prefix = f"LMCACHE_CORE_{service}"
    environ = {
        f"{prefix}SERVICE_HOST": "10.0.0.1",
        f"{prefix}SERVICE_PORT": "80",
        f"{prefix}SERVICE_PORT_HTTP": "80",
        f"{prefix}PORT": "tcp://10.0.0.1:80",
        f"{prefix}PORT_80_TCP": "tcp://10.0.0.1:80",
        f"{prefix}PORT_80_TCP_PROTO": "tcp",
        f"{prefix}PORT_80_TCP_PORT": "80",
        f"{prefix}PORT_80_TCP_ADDR": "10.0.0.1",
    }
    composed = compose(registry, [], environ)
    assert composed.warnings == []
    assert not composed.settings.l2


def test_no_top_level_setting_has_a_name_that_kubernetes_uses(registry: Registry) -> None:
    top = {path[0] for path in compose(registry, [], {}).schema}
    assert not {name for name in top if name.endswith(("port", "service_host"))}


def test_a_warning_about_a_strange_name_steers_no_terminal(registry: Registry) -> None:
    (warning,) = compose(registry, [], {"LMCACHE_CORE_\x1b[2J\nevil": "1"}).warnings
    assert warning.isprintable()
    assert "is not a setting" in warning
