"""A secret is read as text and is never shown: not in a repr, not in a dump, not in an error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.errors import SettingsError
from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.compose import compose
from lmcache_core.settings.present import rows

Toml = Callable[[str], Path]
SECRET = "hunter2-hunter2"
FLAGS = ["--l2.cold.type=acme", "--l2.cold.bucket=b", f"--l2.cold.token={SECRET}"]
CHAIN = f'[l2.cold]\ntype = "plain"\nserde = [{{type = "squeeze", secret = "{SECRET}"}}]\n'


def test_a_secret_of_digits_stays_the_text_it_is(registry: Registry) -> None:
    environ = {
        "LMCACHE_CORE_L2__COLD__TYPE": "acme",
        "LMCACHE_CORE_L2__COLD__BUCKET": "b",
        "LMCACHE_CORE_L2__COLD__TOKEN": "0012345",
    }
    assert compose(registry, [], environ).settings.l2["cold"].settings.token.get_secret_value() == "0012345"


def test_a_secret_is_hidden_wherever_settings_are_shown(registry: Registry, toml: Toml) -> None:
    for composed in (compose(registry, FLAGS, {}), compose(registry, [], {}, toml(CHAIN))):
        settings = composed.settings
        shown = [repr(settings), str(settings), repr(composed), str(settings.model_dump()), settings.model_dump_json()]
        shown += [json.dumps([row.value for row in rows(composed)]), str([row.text for row in rows(composed)])]
        for text in shown:
            assert SECRET not in text
        assert "**********" in shown[-1]


@pytest.mark.parametrize("extra", [["--l2.cold.verify", "maybe"], ["--l2.cold.nonsense", "x"], ["--l1.watermark", "9"]])
def test_a_secret_is_in_no_error_about_something_else(registry: Registry, extra: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        compose(registry, [*FLAGS, *extra], {})
    assert SECRET not in str(caught.value)


def test_a_secret_is_in_no_error_about_itself_even_if_the_plugin_says_it(registry: Registry, toml: Toml) -> None:
    with pytest.raises(SettingsError, match=r"l2\.cold\.token.*\*\*\*\* is too short") as caught:
        compose(registry, ["--l2.cold.type=acme", "--l2.cold.bucket=b", "--l2.cold.token=abc"], {})
    assert "abc" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(SettingsError) as caught:
        compose(registry, [], {}, toml('[l2.cold]\ntype = "acme"\nbucket = "b"\ntoken = 87654321\n'))
    assert "87654321" not in str(caught.value)


def test_no_reader_of_settings_logs_a_secret(
    registry: Registry, toml: Toml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYDANTIC_SETTINGS_DEBUG", "1")  # it logs whatever each source has, at debug level
    with caplog.at_level(logging.DEBUG):
        compose(registry, FLAGS, {}, toml(CHAIN.replace("cold", "other")))
    assert SECRET not in caplog.text


@pytest.mark.parametrize("first", ["!", "*", "%", "@", "`", "{", "["])
def test_a_secret_that_yaml_cannot_read_is_not_printed(registry: Registry, tmp_path: Path, first: str) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(f"l2:\n  cold:\n    type: acme\n    bucket: b\n    token: {first}{SECRET}\n")
    with pytest.raises(SettingsError) as caught:
        compose(registry, [], {}, path)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("given", [f'[{{"secret": "{SECRET}"}}]', f'[["{SECRET}"]]'])
def test_a_secret_in_a_chain_that_names_no_serde_is_not_printed(registry: Registry, given: str) -> None:
    with pytest.raises(SettingsError, match="does not name a serde") as caught:
        compose(registry, ["--l2.cold.type=plain", f"--l2.cold.serde={given}"], {})
    assert SECRET not in str(caught.value)
