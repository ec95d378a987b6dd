"""The contract's page equals the docstrings, and every public name has one."""

from __future__ import annotations

import importlib.util
import inspect
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("contract_page", ROOT / "tools/contract_page.py")
assert _SPEC is not None
assert _SPEC.loader is not None
tool: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)
SHOWN = [getattr(import_module(module), name) for _, module, names in tool.SECTIONS for name in names]


def test_the_page_is_what_the_docstrings_say() -> None:
    assert tool.PAGE.read_text() == tool.page(), "python tools/contract_page.py writes it again"


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.__name__)
def test_help_explains_every_field_and_every_method(shown: Any) -> None:
    told = inspect.getdoc(shown) or ""
    if inspect.isfunction(shown):
        assert told
        return
    if issubclass(shown, Enum):
        fields = [member.name for member in shown]
    elif issubclass(shown, tuple) or hasattr(shown, "__dataclass_fields__"):
        fields = list(shown.__annotations__)
    else:
        fields = [name for name in vars(shown).get("__annotations__", {}) if name != "capabilities"]
    assert [name for name in fields if name not in told] == []
    methods = [name for name, each in vars(shown).items() if inspect.isfunction(each) and name[0] != "_"]
    methods = [name for name in methods if name not in fields]
    assert [name for name in methods if not inspect.getdoc(getattr(shown, name))] == []
