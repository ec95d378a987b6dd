"""What a lossy codec does to a model's answers, as it was measured: a file that a tier may demand.

`lmcache-core quality` writes it. Whatever else makes KV that is not the engine's own can be certified in the same form:
a name with parameters, the model, and what its answers lose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.files import open_regular
from lmcache_core.limits import CERTIFICATE_BYTES_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.textfiles import text_of
from lmcache_core.tokens.namespace import label_from, label_of_weights

FORMAT = 1  # of the file; incremented when the meaning of what is in it changes

Described = Sequence[tuple[str, Mapping[str, str | int | float]]]


class Spread(msgspec.Struct, frozen=True):
    """Over the texts that were measured."""

    mean: float
    deviation: float


class Measured(msgspec.Struct, frozen=True):
    """Of one chain. `lossy`: its lossy codecs, each with its parameters. `divergence`: Kullback-Leibler's, in nats a
    token; `agreement`: how often the most likely token stays the same."""

    lossy: Described
    divergence: Spread
    agreement: Spread


class Certificate(msgspec.Struct, frozen=True):
    """`weights`: the state of the model's weights, as namespaces have it; `dtype`: of its KV."""

    format: int
    model: str
    weights: str
    dtype: str
    chains: list[Measured]

    def check(self, layout: Layout, label: str) -> None:
        """Raises `UsageError` for a namespace of another dtype or model. The model is known by its label: the version
        of its weights, or its name where the certificate has no version. Without a label nothing is known of it."""
        if layout.dtype != self.dtype:
            raise UsageError(f"its certificate is for KV in {self.dtype}, and this is {layout}")
        known = label_of_weights(self.weights)
        rest = rf"(/{layout.dtype})?( \d+/\d+)?"  # of a label that a namespace makes itself
        name, version = (".*", re.escape(known)) if known else (re.escape(label_from(self.model)), "(@[^/ ]*)?")
        if label and not re.fullmatch(name + version + rest, label):
            raise UsageError(f"its certificate is for the model {self.model}{known}, and this is {label}")


def certificate_for(
    lossy: Described,
    path: Path,
    divergence_max: float,
    agreement_min: float,
    setting: str,
    *,
    measure: str = "",
    relax: str = "use a serde that loses less, or relax divergence_max and agreement_min of the tier",
) -> Certificate:
    """The certificate in a file, for a chain with these lossy codecs. Raises `SettingsError` with the cure if the file
    cannot be read, has no such chain, or says that it changes answers more than is allowed. `setting`: the one that
    demands it. `measure`, `relax`: the options that measure it, and what to do if it changes too much; those of serdes
    by default."""
    chain = ",".join(name for name, _ in lossy)
    measure = measure or f"--serde {chain}"
    cure = f"measure with `lmcache-core quality MODEL {measure} --certificate {path}`, or leave {setting} out"
    certificate = _read(path, setting, cure)
    wanted = _plain(lossy)
    measured = next((each for each in certificate.chains if _plain(each.lossy) == wanted), None)
    if measured is None:
        others = "; ".join(json.dumps(_plain(each.lossy)) for each in certificate.chains) or "nothing"
        raise SettingsError(f"{setting}: {path} certifies {others}, and not {json.dumps(wanted)}", cure=cure)
    for what in _beyond(measured, divergence_max, agreement_min):
        raise SettingsError(
            f"{setting}: {chain} changes the answers of {certificate.model} too much: {what}",
            cure=relax,
        )
    return certificate


def _read(path: Path, setting: str, cure: str) -> Certificate:
    try:
        with open_regular(path) as file:
            content = file.read(CERTIFICATE_BYTES_MAX + 1)
        if len(content) > CERTIFICATE_BYTES_MAX:
            raise ValueError(f"it has more than {CERTIFICATE_BYTES_MAX:,} bytes")
        certificate = msgspec.json.decode(text_of(content, path), type=Certificate)
    except OSError as error:
        raise SettingsError(f"{setting}: {path} cannot be read: {error.strerror}", cure=cure) from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{setting}: {path} is no certificate: {error}", cure=cure) from error
    if certificate.format != FORMAT:
        raise SettingsError(f"{setting}: {path} has format {certificate.format}, and this reads {FORMAT}", cure=cure)
    return certificate


def _plain(described: Described) -> list[list[object]]:
    return [[name, dict(parameters)] for name, parameters in described]


def _beyond(measured: Measured, divergence_max: float, agreement_min: float) -> Iterator[str]:
    divergence, agreement = measured.divergence.mean, measured.agreement.mean
    if not divergence <= divergence_max:
        yield f"a divergence of {divergence:.4f} nats a token, and divergence_max is {divergence_max}"
    if not agreement >= agreement_min:
        yield f"the same token in {agreement:.4f} of all places, and agreement_min is {agreement_min}"
