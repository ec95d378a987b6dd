"""Whether a model may blend: what `lmcache-core quality --blend` measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.serde.certificate import certificate_for

if TYPE_CHECKING:
    from lmcache_core.tokens import Namespace
    from lmcache_transformers.blend.blender import Blending

SETTING = 'reuse="blend"'


@dataclass(frozen=True)
class Step:
    """Prompts whose kept tokens deviate by up to `deviation`, and by more than in the step before: their divergence,
    nats a token, on average."""

    deviation: float
    divergence: float


class _Row(msgspec.Struct, frozen=True):
    lossy: list[tuple[str, dict[str, str | int | float]]]
    steps: list[Step] = []


class _File(msgspec.Struct, frozen=True):
    chains: list[_Row]


def certified(namespace: Namespace, path: Path | None, blending: Blending) -> float:
    """Up to which deviation prompts may be blended. Raises `SettingsError` or `UsageError`, with the cure, without a
    certificate that does: none at all, one for another model, revision or dtype, for other shares or chunks, or one
    that says that answers change more than is allowed."""
    name, parameters = blending.described()
    measure = f"--blend {blending.share:g} --chunk-tokens {blending.mean}"
    if path is None:
        raise SettingsError(
            f"{SETTING} needs a certificate: nobody has measured what blending does to this model's answers",
            cure=f"measure with `lmcache-core quality MODEL {measure} --certificate FILE`, and give certificate=FILE",
        )
    found = certificate_for(
        [(name, parameters)],
        path,
        blending.divergence_max,
        blending.agreement_min,
        SETTING,
        measure=measure,
        relax="recompute a larger share, or relax divergence_max and agreement_min of Blending",
    )
    try:
        found.check(namespace.layout, namespace.public_label)
    except UsageError as error:
        raise UsageError(f"{SETTING}: {path}: {error}") from error
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=_File).chains
    except ValueError as error:
        raise SettingsError(
            f"{SETTING}: {path} is no certificate: {error}", cure=f"measure again, with {measure}"
        ) from error
    steps = next((row.steps for row in rows if row.lossy == [(name, parameters)]), [])
    limit = deviation_max(steps, blending.divergence_max)
    if not limit > 0 and blending.share < 1:
        raise SettingsError(
            f"{SETTING}: {path} says of no deviation that the divergence stays below {blending.divergence_max}",
            cure="recompute a larger share, or relax divergence_max of Blending",
        )
    return limit


def deviation_max(steps: Sequence[Step], divergence_max: float) -> float:
    """The end of the last step before the divergence is too large."""
    limit = 0.0
    for step in steps:
        if not step.divergence <= divergence_max:
            break
        limit = step.deviation
    return limit


def steps_of(measured: Sequence[tuple[float, float]], size: int = 16) -> list[Step]:
    """Of the deviation and the divergence of each prompt: steps of about `size` prompts."""
    ordered = sorted(measured)
    count = max(1, len(ordered) // size)
    ends = [len(ordered) * (at + 1) // count for at in range(count)]
    found = []
    for start, end in zip([0, *ends], ends, strict=False):
        part = ordered[start:end]
        found.append(Step(part[-1][0], sum(each for _, each in part) / len(part)))
    return found
