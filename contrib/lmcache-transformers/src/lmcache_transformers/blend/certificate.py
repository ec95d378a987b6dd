"""Whether a model may blend: what `lmcache-core quality --blend` measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.files import open_regular
from lmcache_core.limits import CERTIFICATE_BYTES_MAX
from lmcache_core.serde.certificate import certificate_for
from lmcache_transformers.blend.conditions import Conditions, covering

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


@dataclass(frozen=True)
class Covered:
    """What a certificate allows: prompts up to `deviation_max`, of chunks of `shortest` to `longest` tokens."""

    deviation_max: float
    shortest: int
    longest: int

    def holds(self, tokens: int) -> bool:
        """Whether chunks of so many tokens were measured. What remains of a document at its end may be shorter."""
        return self.shortest <= tokens <= self.longest


class _Row(msgspec.Struct, frozen=True):
    lossy: list[tuple[str, dict[str, str | int | float]]]
    steps: list[Step] = []


class _File(msgspec.Struct, frozen=True):
    chains: list[_Row]


def certified(namespace: Namespace, path: Path | None, blending: Blending) -> Covered:
    """What may be blended. Raises `SettingsError` or `UsageError`, with the cure, without a certificate that does:
    none at all, one for another model, revision or dtype, for other conditions, or one that says that answers change
    more than is allowed."""
    wanted = blending.conditions
    lengths = sorted({blending.minimum, blending.mean, blending.maximum})
    measure = f"--blend {blending.share:g} --chunk-tokens {' '.join(map(str, lengths))}"
    if path is None:
        raise SettingsError(
            f"{SETTING} needs a certificate: nobody has measured what blending does to this model's answers",
            cure=f"measure with `lmcache-core quality MODEL {measure} --certificate FILE`, and give certificate=FILE",
        )
    rows = _rows(path, measure)
    found = covering(wanted, list(rows))
    for each in found or [wanted]:  # if none does, this says so
        certificate = certificate_for(
            each.lossy(),
            path,
            blending.divergence_max,
            blending.agreement_min,
            SETTING,
            measure=measure,
            relax="recompute a larger share, or relax divergence_max and agreement_min of Blending",
        )
        try:
            certificate.check(namespace.layout, namespace.public_label)
        except UsageError as error:
            raise UsageError(f"{SETTING}: {path}: {error}") from error
    limits = [deviation_max(rows[each], blending.divergence_max) for each in found]
    if not min(limits) > 0 and blending.share < 1:
        raise SettingsError(
            f"{SETTING}: {path} says of no deviation that the divergence stays below {blending.divergence_max}",
            cure="recompute a larger share, or relax divergence_max of Blending",
        )
    return Covered(min(limits), min(each.shortest for each in found), max(each.longest for each in found))


def _rows(path: Path, measure: str) -> dict[Conditions, list[Step]]:
    """Of the rows that are of blending."""
    cure = f"measure with `lmcache-core quality MODEL {measure} --certificate {path}`"
    try:
        with open_regular(path) as file:
            rows = msgspec.json.decode(file.read(CERTIFICATE_BYTES_MAX), type=_File).chains
    except OSError as error:
        raise SettingsError(f"{SETTING}: {path} cannot be read: {error.strerror}", cure=cure) from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{SETTING}: {path} is no certificate: {error}", cure=cure) from error
    found = [(conditions, row.steps) for row in rows if (conditions := Conditions.read(row.lossy)) is not None]
    if len(dict(found)) != len(found):
        raise SettingsError(f"{SETTING}: {path} has two rows of the same conditions", cure=cure)
    return dict(found)


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
