"""The hygiene of a plugin package, as tests.

class TestPackage(PluginPackageContract):
    distribution = "lmcache-acme"
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from packaging.requirements import Requirement

from lmcache_core.kernel.contracts import EvictionPolicy
from lmcache_core.observe.subscriber import EventSubscriber
from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.discovery import ALLOW_LIST, Candidate, canonical, find_candidates
from lmcache_core.plugins.examine import PREFIX, hook_names
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.registry import Registry
from lmcache_core.policies.contracts import PrefetchPolicy, StorePolicy
from lmcache_core.serde.contract import Serde
from lmcache_core.server.companion import Companion
from lmcache_core.server.operation import ServerOperation
from lmcache_core.tiers.contract import L2Adapter
from lmcache_testing.contract import Contract

# Importing these would slow down everybody's `lmcache-core --help`.
HEAVY = (
    "asyncio", "boto3", "botocore", "cryptography", "hypothesis", "lz4", "msgspec", "numpy", "pandas", "pydantic",
    "pytest", "redis", "requests", "rich", "scipy", "sqlite3", "torch", "transformers", "urllib3", "xxhash", "zmq",
    "zstandard",
)  # fmt: skip
SECRET_NAME = re.compile(r"(^|_)(password|passwd|passphrase|secret|token|credentials?|api_key|access_key|private_key)$")
SECRET = "correct-horse-battery-staple"
_BASES = {
    Kind.L2_ADAPTER: L2Adapter,
    Kind.EVICTION_POLICY: EvictionPolicy,
    Kind.STORE_POLICY: StorePolicy,
    Kind.PREFETCH_POLICY: PrefetchPolicy,
    Kind.SERDE: Serde,
    Kind.COMPANION: Companion,
    Kind.EVENT_SUBSCRIBER: EventSubscriber,
    Kind.OPERATION: ServerOperation,
}


class PluginPackageContract(Contract):
    """For an installed distribution that provides plugins."""

    distribution: ClassVar[str] = ""
    heavy: ClassVar[Sequence[str]] = ()  # more modules, besides HEAVY, that the entry point must not import

    @pytest.fixture
    def entries(self) -> list[Candidate]:
        if not self.distribution:
            pytest.fail(f"{type(self).__name__} has no distribution: name it, as pip does", pytrace=False)
        mine = [one for one in find_candidates() if canonical(one.distribution) == canonical(self.distribution)]
        if not mine:
            pytest.fail(
                f"{self.distribution} has no entry point in the group lmcache_core: is it installed?", pytrace=False
            )
        return mine

    @pytest.fixture
    def registry(self, entries: list[Candidate]) -> Registry:
        """Only the built-ins and this distribution."""
        return load_plugins({ALLOW_LIST: self.distribution})

    def _specs(self, registry: Registry) -> Iterator[ComponentSpec]:
        for record in registry.plugins:
            if canonical(record.distribution) == canonical(self.distribution):
                yield from record.components

    def test_the_loader_takes_it(self, entries: list[Candidate], registry: Registry) -> None:
        refused = [str(refusal) for refusal in registry.refused if not refusal.chosen]
        assert not refused, f"the loader refuses {', '.join(refused)}"
        missing = {entry.name for entry in entries} - {record.name for record in registry.plugins}
        assert not missing, f"entry points {sorted(missing)} are there, and the loader has no plugins of these names"

    def test_its_entry_point_imports_nothing_heavy(self, entries: list[Candidate], registry: Registry) -> None:
        own = {path.partition(":")[0] for spec in self._specs(registry) for path in (spec.factory, spec.settings or "")}
        for entry in entries:
            module = entry.target.partition(":")[0]
            forbidden = sorted({*HEAVY, *self.heavy, *own} - {module, ""})
            # Modules that lmcache-core itself imports do not count.
            code = (
                "import sys, json, lmcache_core; before = set(sys.modules); "
                f"import {module}; print(json.dumps([m for m in {forbidden!r} if m in set(sys.modules) - before]))"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"importing {module} fails: {done.stderr.strip()[-500:]}"
            found = json.loads(done.stdout.splitlines()[-1])
            assert found == [], f"{module} imports {found}: name factories by import path, and import in functions"

    def test_every_hook_it_names_is_a_hook(self, entries: list[Candidate]) -> None:
        for entry in entries:
            module, _, attribute = entry.target.partition(":")
            plugin: Any = importlib.import_module(module)
            for part in filter(None, attribute.split(".")):
                plugin = getattr(plugin, part)
            defined = [
                name
                for name in dir(plugin)
                if name.startswith(PREFIX) and callable(getattr(plugin, name)) and name != PREFIX.rstrip("_")
            ]
            unknown = sorted(set(defined) - set(hook_names()))
            assert unknown == [], f"{entry.target} defines {unknown}: lmcache_… are names of hooks"

    def test_every_component_is_what_it_says(self, registry: Registry) -> None:
        for spec in self._specs(registry):
            factory = registry.factory(spec.kind, spec.name)
            assert callable(factory), (
                f"{spec.factory} is a {type(factory).__name__}, and cannot be called to build {spec.name!r}"
            )
            if isinstance(factory, type):
                assert issubclass(factory, _BASES[spec.kind]), f"{spec.factory} is no {_BASES[spec.kind].__name__}"
            assert spec.summary, f"{spec.kind} {spec.name!r} has no summary: `lmcache-core plugins` shows it"

    def test_settings_are_frozen_and_forbid_what_they_do_not_know(self, registry: Registry) -> None:
        for name, model in self._models(registry):
            assert model.model_config.get("frozen"), f"the settings of {name} are not frozen"
            assert model.model_config.get("extra") == "forbid", f"the settings of {name} take any name"
            silent = [field for field, about in model.model_fields.items() if not about.description]
            assert silent == [], f"settings of {name} without a description: {silent}; it stands in --help"

    def test_secrets_are_redacted(self, registry: Registry) -> None:
        from pydantic import SecretStr

        for name, model in self._models(registry):
            values = {}
            for field, about in model.model_fields.items():
                is_secret = "SecretStr" in str(about.annotation) or "SecretBytes" in str(about.annotation)
                if SECRET_NAME.search(field):
                    assert is_secret, f"{name}.{field} sounds like a secret: make it a SecretStr"
                if is_secret:
                    values[field] = SecretStr(SECRET)
            made = model.model_construct(**values)
            for shown in (repr(made), str(made), str(made.model_dump(warnings=False))):
                assert SECRET not in shown, f"the settings of {name} show a secret"

    def test_it_bounds_the_core_that_it_was_written_for(self, entries: list[Candidate]) -> None:
        wanted = importlib.metadata.requires(self.distribution) or []
        ours = [one for one in map(Requirement, wanted) if canonical(one.name) == "lmcache-core" and not one.marker]
        assert ours, f"{self.distribution} does not depend on lmcache-core"
        bounded = any(each.operator in ("<", "<=", "~=", "==") for one in ours for each in one.specifier)
        assert bounded, f"{self.distribution} takes any later lmcache-core: write 'lmcache-core>=0.1,<0.2'"

    def _models(self, registry: Registry) -> Iterator[tuple[str, Any]]:
        for spec in self._specs(registry):
            if spec.settings is not None:
                yield spec.name, registry.settings_model(spec.kind, spec.name)
