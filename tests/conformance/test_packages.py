"""The hygiene of every plugin package of ours, and: nothing is registered that no contract covers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_core import Kind
from lmcache_core.plugins.discovery import find_candidates
from lmcache_core.plugins.loader import load_plugins
from lmcache_testing import PluginPackageContract

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    "L2AdapterContract": Kind.L2_ADAPTER,
    "EvictionPolicyContract": Kind.EVICTION_POLICY,
    "StorePolicyContract": Kind.STORE_POLICY,
    "PrefetchPolicyContract": Kind.PREFETCH_POLICY,
    "SerdeContract": Kind.SERDE,
    "CompanionContract": Kind.COMPANION,
    "EventSubscriberContract": Kind.EVENT_SUBSCRIBER,
    "OperationContract": Kind.OPERATION,
    "HelperContract": Kind.HELPER,
    "TracerContract": Kind.TRACER,
    "PluginPackageContract": None,
}


class TestFs(PluginPackageContract):
    distribution = "lmcache-fs"


class TestBlock(PluginPackageContract):
    distribution = "lmcache-block"


class TestMooncake(PluginPackageContract):
    distribution = "lmcache-mooncake"


class TestPolicies(PluginPackageContract):
    distribution = "lmcache-policies"


class TestFp8(PluginPackageContract):
    distribution = "lmcache-fp8"


class TestQuant(PluginPackageContract):
    distribution = "lmcache-quant"


class TestBlend(PluginPackageContract):
    distribution = "lmcache-blend"


class TestCompress(PluginPackageContract):
    distribution = "lmcache-compress"


class TestCrypto(PluginPackageContract):
    distribution = "lmcache-crypto"


class TestS3(PluginPackageContract):
    distribution = "lmcache-s3"


class TestRedis(PluginPackageContract):
    distribution = "lmcache-redis"


class TestCopier(PluginPackageContract):
    distribution = "lmcache-copier"


class TestPeer(PluginPackageContract):
    distribution = "lmcache-peer"


class TestTransformers(PluginPackageContract):
    distribution = "lmcache-transformers"


class TestVllm(PluginPackageContract):
    distribution = "lmcache-core-vllm"


class TestL0(PluginPackageContract):
    distribution = "lmcache-l0"


class TestBench(PluginPackageContract):
    distribution = "lmcache-bench"


class TestHosts(PluginPackageContract):
    distribution = "lmcache-hosts"


class TestKit(PluginPackageContract):
    distribution = "lmcache-testing"


class TestTools(PluginPackageContract):
    distribution = "lmcache-tools"


class TestLab(PluginPackageContract):
    distribution = "lmcache-lab"


def sources() -> list[Path]:
    return sorted(
        path for folder in ("tests", "plugins", "contrib", "core/tests") for path in (ROOT / folder).rglob("test_*.py")
    )


def covered() -> tuple[set[tuple[Kind, str]], set[str]]:
    """Components and distributions that some collected test class puts under a contract: read from the sources,
    because the classes of other packages need not be imported here."""
    components: set[tuple[Kind, str]] = set()
    distributions: set[str] = set()
    for path in sources():
        classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
        for node in classes.values():
            contract = contract_of(node, classes)
            if contract is None or not node.name.startswith("Test"):
                continue
            for name, value in texts(node, classes):
                kind = CONTRACTS[contract]
                if name == "component" and kind is not None:
                    components.add((kind, value))
                if name == "distribution" and kind is None:
                    distributions.add(value)
    return components, distributions


def contract_of(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> str | None:
    for base in node.bases:
        name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        found = name if name in CONTRACTS else contract_of(classes[name], classes) if name in classes else None
        if found is not None:
            return found
    return None


def texts(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, str]]:
    """Class attributes that are text, its bases' in the same file among them."""
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            for target in line.targets:
                if isinstance(target, ast.Name):
                    yield target.id, line.value.value
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from texts(classes[base.id], classes)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_registered_component_is_covered_by_a_contract(kind: Kind) -> None:
    registered = {
        (kind, spec.name) for spec in load_plugins({"LMCACHE_CORE_PLUGINS": ",".join(ours())}).components(kind)
    }
    assert registered - covered()[0] == set(), "put them under a contract class with component = …"


def test_every_package_of_ours_is_covered() -> None:
    assert ours() - covered()[1] == set()


def ours() -> set[str]:
    """Distributions with plugins whose sources stand in this repository and are installed."""
    here = {path.parent.name for path in ROOT.glob("*/*/pyproject.toml")}
    return {candidate.distribution for candidate in find_candidates()} & here


def test_our_packages_and_their_contract_classes_are_found() -> None:
    assert {"lmcache-fs", "lmcache-policies"} <= ours()
    assert (Kind.L2_ADAPTER, "fs") in covered()[0]
    assert (Kind.L2_ADAPTER, "nowhere") not in covered()[0]
