"""Versions of vLLM that the connector knows: its interface changes with each minor one."""

from __future__ import annotations

import re

# Minor versions, and what stands behind each. The table in docs/engines/vllm.md has the same.
SUPPORTED = {
    (0, 32): "all tests run with it, on the CPU",
    (0, 33): "its interface is compared; no engine of it has been run",
}
OLDEST = min(SUPPORTED)
CURE = "install one of these in the engine's environment, or start vLLM without this connector"


def minor_of(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version such as "0.33.1rc2"; None if it has none."""
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def is_too_old(version: str) -> bool:
    """Whether it lacks what the connector imports."""
    minor = minor_of(version)
    return minor is not None and minor < OLDEST


def refusal(version: str) -> str:
    """Why the connector does not serve this version, and what to do; empty if it does."""
    if minor_of(version) in SUPPORTED:
        return ""
    known = " and ".join(f"{major}.{minor}" for major, minor in sorted(SUPPORTED))
    return f"this is vLLM {version}, and lmcache-core-vllm knows {known}: {CURE}"
