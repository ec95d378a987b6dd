"""`docs/plugins/settings.md` says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcache_core.plugins.registry import Registry
from lmcache_core.settings.compose import compose_from, make_settings
from lmcache_core.settings.model import TierSettings
from lmcache_core.settings.present import default_text
from lmcache_core.settings.schema import SettingField, fields_of
from lmcache_core.settings.sources import dotted

DOCS = Path(__file__).parents[3] / "docs" / "plugins" / "settings.md"

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the docs are not part of this copy")


def line_of(setting: SettingField) -> str:
    default = "required" if setting.required else f"`{default_text(setting)}`"
    kind = setting.type_text.replace("|", " or ")
    return f"| `{dotted(setting.path)}` | {kind} | {default} | {setting.description} |"


def test_every_setting_stands_in_the_docs_with_its_type_and_default(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    settings = [*compose_from(registry, {}).schema.values(), *fields_of(TierSettings, ("l2", "NAME"))]
    absent = [line for line in map(line_of, settings) if line not in DOCS.read_text()]
    assert absent == []


def test_the_docs_name_no_setting_that_is_not_there(registry: Registry) -> None:
    known = {dotted(path) for path in compose_from(registry, {}).schema}
    known |= {dotted(field.path) for field in fields_of(TierSettings, ("l2", "NAME"))}
    assert set(re.findall(r"^\| `([a-z0-9_.NAME]+)` \|", DOCS.read_text(), re.MULTILINE)) == known


def test_the_model_that_the_docs_show_is_one_that_is_accepted() -> None:
    source = next(block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "Acme" in block)
    found: dict[str, type] = {}
    exec(compile(source, "settings.md", "exec", dont_inherit=True), found)
    model = found["AcmeSettings"]
    assert {field.path for field in fields_of(model)} == {("bucket",), ("token",), ("part_bytes",)}
    assert model(bucket="b", part_bytes="1MiB").part_bytes == 1 << 20


def test_the_settings_that_the_docs_make_are_made(registry: Registry) -> None:
    assert 'make_settings(name="mine", l1={"size_bytes": "64MiB", "backing": "memfd"})' in DOCS.read_text()
    settings = make_settings(registry, name="mine", l1={"size_bytes": "64MiB", "backing": "memfd"})
    assert (settings.name, settings.l1.size_bytes, settings.l1.backing) == ("mine", 64 << 20, "memfd")
