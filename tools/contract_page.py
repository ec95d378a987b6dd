"""Writes docs/plugins/contract.md from the docstrings of the contracts: what `help()` shows, on one page.

    python tools/contract_page.py

A test compares the page with the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from enum import EnumType
from importlib import import_module
from pathlib import Path
from typing import Any, ForwardRef

PAGE = Path(__file__).resolve().parent.parent / "docs/plugins/contract.md"

INTRODUCTION = """# The contract

What a component may rely on, and what it has to do. This page is made of the docstrings, so that `help()` says the
same; `python tools/contract_page.py` writes it. The [kit](testing.md) tests all that a machine can test of it.

A component is called as its kind says, with an instance of its own settings model. The same instance stands in the
settings as a whole, which `lmcache_check` is given: `settings.l2[name].settings` for a tier, and `.settings` wherever a
policy or serde is named.
"""

# Title, the module that authors import from, and what it shows, in this order.
SECTIONS: list[tuple[str, str, list[str]]] = [
    (
        "L2 adapters",
        "lmcache_core.tiers.contract",
        [
            "L2Adapter", "Capabilities", "Result", "Outcome", "StoreItem", "LoadItem", "Usage", "ScanEntry", "ScanPage",
            "AdapterContext", "Recount",
        ],
    ),
    ("Sockets that keep to a deadline", "lmcache_core.tiers.budget", [
            "within", "connect", "left_s", "BudgetSocket", "TooManyBytesError"
        ]),
    (
        "Buffers over one socket",
        "lmcache_core.tiers.streams",
        ["left_s", "limit", "receive_into", "advance"],
    ),
    (
        "Blocking libraries",
        "lmcache_core.tiers.blocking",
        ["BlockingAdapter", "BatchAdapter", "Connections", "filled"],
    ),
    ("Eviction policies", "lmcache_core.policies", ["EvictionPolicy", "Entry"]),
    ("Store policies", "lmcache_core.policies", ["StorePolicy", "StoreCandidate", "StorePlan", "TierView"]),
    ("Prefetch policies", "lmcache_core.policies", ["PrefetchPolicy", "PrefetchPlan"]),
    ("Serdes", "lmcache_core.serde.contract", ["Serde"]),
    ("Event subscribers", "lmcache_core.observe.subscriber", ["EventSubscriber", "SubscriberContext"]),
    ("Tracers", "lmcache_core.observe.tracer", ["RequestTracer", "TracerContext"]),
    (
        "Operations",
        "lmcache_core.server.operation",
        ["ServerOperation", "OperationContext", "PoolView", "ObjectInfo", "AnsweredRequest"],
    ),
    ("Companions", "lmcache_core.server.companion", ["Companion", "CompanionContext"]),
    ("Helpers", "lmcache_core.server.helper", ["HelperProcess", "HelperContext"]),
    ("The plugin itself", "lmcache_core", ["ComponentSpec", "Kind", "PluginInfo", "Finding"]),
]  # fmt: skip


def page() -> str:
    """All of it."""
    parts = [INTRODUCTION]
    for title, module, names in SECTIONS:
        parts.append(f"\n## {title}\n\n```python\nfrom {module} import {', '.join(names)}\n```\n")
        for name in names:
            parts += _class(getattr(import_module(module), name))
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)).rstrip("\n") + "\n"


def _class(shown: Any) -> Iterator[str]:
    if inspect.isfunction(shown):
        yield f"\n### {shown.__name__}\n\n**`{shown.__name__}{_signature(shown)}`**\n\n{_text(shown)}\n"
        return
    yield f"\n### {shown.__name__}\n\n{_text(shown)}\n"
    if not isinstance(shown, EnumType):
        fields = list(_fields(shown))
        if fields:
            yield "\n```python\n" + "".join(f"{line}\n" for line in fields) + "```\n"
    for name, method in vars(shown).items():
        inner = method.fget if isinstance(method, property) else method
        if not inspect.isfunction(inner) or not (inner.__doc__ if name == "__init__" else inspect.getdoc(inner)):
            continue
        if name.startswith("_") and name != "__init__":
            continue
        label = f"{name}" if isinstance(method, property) else f"{name}{_signature(inner)}"
        yield f"\n**`{label}`**\n\n{_text(inner)}\n"


def _fields(shown: Any) -> Iterator[str]:
    """Each with its type and its default, as it stands in the class."""
    defaults = getattr(shown, "_field_defaults", {})
    if dataclasses.is_dataclass(shown):
        defaults = {each.name: each.default for each in dataclasses.fields(shown)}
    for name, annotation in vars(shown).get("__annotations__", {}).items():
        default = defaults.get(name, vars(shown).get(name, dataclasses.MISSING))
        plain = default is None or isinstance(default, (bool, int, float)) or default in ("", "0")
        written = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation  # of named tuples
        yield f"{name}: {written}" + (f" = {default!r}" if plain else "")


def _signature(function: Any) -> str:
    """Without `self`, and with the annotations as they are written."""
    parameters = list(inspect.signature(function).parameters.values())
    given = [
        str(each.replace(annotation=each.annotation)).replace("'", "") for each in parameters if each.name != "self"
    ]
    result = inspect.signature(function).return_annotation
    return f"({', '.join(given)}) -> {result}".replace("'", "")


def _text(documented: Any) -> str:
    """The docstring; its sections as lists."""
    lines = inspect.cleandoc(inspect.getdoc(documented) or "").splitlines()
    told: list[str] = []
    listed = False
    for line in lines:
        if line in ("Attributes:", "Raises:"):
            listed = True
        elif listed and line.startswith("        "):
            told.append(f"  {line.strip()}")
        elif listed and line.startswith("    "):
            name, _, rest = line.strip().partition(": ")
            told.append(f"- `{name}`: {rest}")
        else:
            listed = listed and not line.strip()
            told.append(line)
    return "\n".join(told)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
