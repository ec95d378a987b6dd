"""The part of vLLM's interface that the connector uses, read from source: names that it imports, methods and fields.

    python vllm_interface.py WHEEL_OR_SITE_PACKAGES > interfaces/0.33.0.json

Nothing of vLLM is imported, so a wheel for other machines will do.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "lmcache_core_vllm"
# Classes of vLLM whose fields are used and whose names are not imported: see `scheduler.Request` and its like.
ALSO = [
    ("vllm.v1.request", "Request"),
    ("vllm.v1.core.sched.output", "SchedulerOutput"),
    ("vllm.v1.core.sched.output", "NewRequestData"),
    ("vllm.v1.core.sched.output", "CachedRequestData"),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager"),
    ("vllm.v1.outputs", "KVConnectorOutput"),
    ("vllm.multimodal.inputs", "MultiModalFeatureSpec"),
    ("vllm.config.ec_transfer", "ECTransferConfig"),
]

Read = Callable[[str], str | None]


def imported() -> list[tuple[str, str]]:
    """What our source imports from vLLM: modules and names, sorted."""
    found = set()
    for path in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(str(node.module), each.name) for each in node.names}
    return sorted(found)


def interface(version: str, read: Read) -> dict[str, Any]:
    """Of this version, whose files `read` returns by their path in the wheel; None for those it does not have."""
    modules: dict[str, dict[str, Any]] = {}
    for module, name in [*imported(), *ALSO]:
        path = module.replace(".", "/")
        text = read(f"{path}.py") or read(f"{path}/__init__.py")
        described = None if text is None else _described(ast.parse(text), name)
        modules.setdefault(module, {})[name] = described
    return {"version": version, "modules": modules}


def of_wheel(path: Path) -> dict[str, Any]:
    """From a wheel."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        return interface(path.name.split("-")[1], lambda name: wheel.read(name).decode() if name in names else None)


def of_folder(folder: Path, version: str) -> dict[str, Any]:
    """From an environment's `site-packages`."""
    return interface(version, lambda name: (folder / name).read_text() if (folder / name).exists() else None)


def methods_of(path: Path, name: str) -> dict[str, str]:
    """The methods of a class of ours, with their parameters."""
    described = _described(ast.parse(path.read_text()), name)
    assert described is not None
    return dict(described["methods"])


def _described(tree: ast.Module, name: str) -> dict[str, Any] | None:
    """What the module defines or imports under this name; None: nothing."""
    for node in _statements(tree.body):
        match node:
            case ast.ClassDef(name=found) if found == name:
                return _of_class(node)
            case ast.FunctionDef(name=found) if found == name:
                return {"parameters": ast.unparse(node.args)}
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                if any((each.asname or each.name) == name for each in names):
                    return {"imported": True}
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                return {"assigned": True}
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for block in ("body", "orelse", "handlers") if isinstance(node, ast.If | ast.Try) else ():
            yield from _statements([each for each in getattr(node, block, []) if isinstance(each, ast.stmt)])


def _of_class(node: ast.ClassDef) -> dict[str, Any]:
    methods, abstract, fields = {}, [], set()
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            methods[each.name] = ast.unparse(ast.arguments(**_without_annotations(each.args)))
            if any(ast.unparse(mark).endswith("abstractmethod") for mark in each.decorator_list):
                abstract.append(each.name)
            for inner in ast.walk(each):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    fields |= {inner.attr} if ast.unparse(inner.value) == "self" else set()
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            fields.add(each.target.id)
        elif isinstance(each, ast.Assign):
            fields |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    return {
        "methods": dict(sorted(methods.items())),
        "abstract": sorted(abstract),
        "fields": sorted(name for name in fields if not name.startswith("_")),
    }


def _without_annotations(args: ast.arguments) -> dict[str, Any]:
    def bare(each: ast.arg | None) -> ast.arg | None:
        return None if each is None else ast.arg(each.arg)

    return {
        "posonlyargs": [bare(each) for each in args.posonlyargs],
        "args": [bare(each) for each in args.args],
        "vararg": bare(args.vararg),
        "kwonlyargs": [bare(each) for each in args.kwonlyargs],
        "kw_defaults": args.kw_defaults,
        "kwarg": bare(args.kwarg),
        "defaults": args.defaults,
    }


if __name__ == "__main__":
    source = Path(sys.argv[1])
    made = of_wheel(source) if source.suffix == ".whl" else of_folder(source, sys.argv[2])
    print(json.dumps(made, indent=1, sort_keys=True))
