"""Our packages and what they ask for, as their pyproject.toml have it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core"
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("*/*/pyproject.toml"))}

ALL = tuple(name.removeprefix("lmcache-") for name in PACKAGES)  # but core, which every session installs


def folders(*names: str) -> list[Path]:
    """Where packages of ours lie, named without `lmcache-`."""
    return [CORE if name == "core" else PACKAGES[f"lmcache-{name}"] for name in names]


def pyproject(path: Path) -> dict[str, Any]:
    return tomllib.loads((path / "pyproject.toml").read_text())


def group(*names: str) -> tuple[str, ...]:
    """The requirements of these dependency groups. The kit, which is ours, is among those of `test`."""
    groups = pyproject(ROOT)["dependency-groups"]
    found: list[str] = []
    for name in names:
        for each in groups[name]:
            found += [each] if isinstance(each, str) else group(each["include-group"])
    return tuple(found)


def medium_group(medium: str) -> tuple[str, ...]:
    """The dependency group of a medium of the matrix: what its tests need from an index. Some need nothing."""
    name = f"matrix-{medium}"
    return (name,) if name in pyproject(ROOT)["dependency-groups"] else ()


def ours_of(requirements: Iterable[str]) -> list[str]:
    """Names of our packages among some requirements."""
    names = [re.split(r"[\[<>=!~; ]", each, maxsplit=1)[0] for each in requirements]
    return [each for each in names if each in PACKAGES]


def strangers(requirements: Iterable[str]) -> list[str]:
    """The requirements that an index has."""
    return [each for each in requirements if not ours_of([each])]


def with_ours(packages: Iterable[Path], tools: Iterable[str] = ()) -> list[Path]:
    """These local packages, and those that they or the tools ask for."""
    found: list[Path] = []
    pending = [*packages, *(PACKAGES[name] for name in ours_of(tools))]
    while pending:
        package = pending.pop(0)
        if package not in found:
            found.append(package)
            pending += [PACKAGES[name] for name in ours_of(pyproject(package)["project"]["dependencies"])]
    return found


def test_requirements(*packages: Path) -> tuple[str, ...]:
    """What the packages' own tests need beside them: their dependency groups `test`."""
    return tuple(
        sorted({each for path in packages for each in pyproject(path).get("dependency-groups", {}).get("test", [])})
    )


def build_requirements(packages: Iterable[Path]) -> list[str]:
    """What builds these packages."""
    return sorted({each for path in packages for each in pyproject(path)["build-system"]["requires"]})


def packages_of(paths: Iterable[str | Path]) -> list[Path]:
    """The packages whose tests these paths are; all, if one of them spans packages (`tests/…`)."""
    found: list[Path] = []
    for path in paths:
        inside = Path(str(path).partition("::")[0]).resolve()
        own = [each for each in (CORE, *PACKAGES.values()) if inside.is_relative_to(each)]
        found += own or [CORE, *PACKAGES.values()]
    return list(dict.fromkeys(found))
