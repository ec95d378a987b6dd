"""The package as its users meet it: one light front module, closed settings, everything built by the registry."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from lmcache_core import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.policies import EvictionPolicy, StorePolicy

REQUIRED: dict[str, dict[str, Any]] = {"isolated": {"tenants": {}}, "size_aware": {"tiers": {}}}
COMPONENTS = [
    (spec.kind, spec.name)
    for record in load_plugins().plugins
    if record.name == "policies"
    for spec in record.components
]


def test_the_package_offers_what_its_readme_lists() -> None:
    assert {name for _, name in COMPONENTS} == {
        "fifo", "lfu", "mru", "arc", "s3fifo", "lruk", "adaptive", "isolated", "size_aware", "wear_aware"
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), COMPONENTS, ids=[name for _, name in COMPONENTS])
def test_the_registry_builds_every_component(kind: Kind, name: str) -> None:
    built = load_plugins().build(kind, name, REQUIRED.get(name))
    assert isinstance(built, EvictionPolicy if kind is Kind.EVICTION_POLICY else StorePolicy)


@pytest.mark.parametrize(("kind", "name"), COMPONENTS, ids=[name for _, name in COMPONENTS])
def test_settings_are_frozen_and_refuse_unknown_names(kind: Kind, name: str) -> None:
    model = load_plugins().settings_model(kind, name)
    if model is None:
        assert name in ("adaptive", "fifo", "lfu", "mru")
        return
    values = REQUIRED.get(name, {})
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        model.model_validate({**values, "no_such_setting": 1})
    settings: BaseModel = model.model_validate(values)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(settings, next(iter(model.model_fields)), 1)


def test_the_front_module_imports_nothing_heavy() -> None:
    script = "import json, sys, lmcache_policies; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "lmcache_policies" in loaded
    assert not loaded & {"pydantic", "xxhash", "torch", "numpy", "zmq", "msgspec", "lmcache_policies.settings"}
