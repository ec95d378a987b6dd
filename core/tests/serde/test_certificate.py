"""A certificate is accepted for the codec, model and dtype that it was measured with, and refused with a cure else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.certificate import Certificate, certificate_for
from lmcache_core.tokens.namespace import Namespace

INT8 = ("int8", {"format": 1, "group_tokens": 64})
SETTING = "l2.cold.require_certificate"
LAYOUT = Layout("bfloat16", (2, 4, 8), "KTD")


def written(path: Path, **changes: Any) -> Path:
    chain = {"lossy": [INT8], "divergence": _spread(0.002), "agreement": _spread(0.97), "size": 0.5}
    whole = {"format": 1, "model": "org/small", "weights": "0123456789abcdef", "dtype": "bfloat16", "chains": [chain]}
    path.write_text(json.dumps(whole | changes))
    return path


def _spread(mean: float) -> dict[str, float]:
    return {"mean": mean, "deviation": 0.001}


def read(path: Path, lossy: Any = (INT8,), divergence_max: float = 0.01, agreement_min: float = 0.9) -> Certificate:
    return certificate_for(lossy, path, divergence_max, agreement_min, SETTING)


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        read(path, **options)
    assert SETTING in str(caught.value)
    return str(caught.value)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 200_000)
    assert "is no certificate" in refused(tmp_path / "deep")


def test_what_was_measured_is_accepted(tmp_path: Path) -> None:
    assert read(written(tmp_path / "c")).model == "org/small"


def test_a_certificate_that_is_missing_or_something_else_is_refused_with_the_command_that_makes_one(
    tmp_path: Path,
) -> None:
    cure = "quality MODEL --serde int8 --certificate"
    assert cure in refused(tmp_path / "none")
    (tmp_path / "text").write_text("no JSON")
    assert cure in refused(tmp_path / "text")
    (tmp_path / "other").write_text('{"format": 1, "model": "m"}')
    assert cure in refused(tmp_path / "other")
    (tmp_path / "large").write_bytes(bytes(2 << 20))
    assert "more than" in refused(tmp_path / "large")
    assert "format 2" in refused(written(tmp_path / "later", format=2))


@pytest.mark.parametrize(
    "lossy", [[("int8", {"format": 1, "group_tokens": 32})], [("int4", INT8[1])], [INT8, INT8], [("int8", {})]]
)
def test_other_serdes_and_other_parameters_are_refused(tmp_path: Path, lossy: Any) -> None:
    assert "certifies" in refused(written(tmp_path / "c"), lossy=lossy)


def test_the_bounds_are_the_settings(tmp_path: Path) -> None:
    file = written(tmp_path / "c")
    assert "0.0020 nats" in refused(file, divergence_max=0.001)
    assert "0.9700 of all" in refused(file, agreement_min=0.99)
    assert read(file, divergence_max=0.002, agreement_min=0.97)


@pytest.mark.parametrize(
    ("namespace", "why"),
    [
        (Namespace("org/small", LAYOUT, "0123456789abcdef"), ""),
        (Namespace("/models/copy-of-it", LAYOUT, "0123456789abcdef"), ""),
        (Namespace("org/small", LAYOUT, "f" * 16), "for the model"),
        (Namespace("org/small", LAYOUT), "for the model"),
        (Namespace("org/small", Layout("float16", LAYOUT.shape, "KTD"), "0123456789abcdef"), "for KV in bfloat16"),
    ],
)
def test_namespaces_of_another_model_or_dtype_are_refused(tmp_path: Path, namespace: Namespace, why: str) -> None:
    certificate = read(written(tmp_path / "c"))
    if why:
        with pytest.raises(UsageError, match=why):
            certificate.check(namespace.layout, namespace.public_label)
    else:
        certificate.check(namespace.layout, namespace.public_label)


def test_without_a_version_of_the_weights_the_name_must_be_the_same(tmp_path: Path) -> None:
    certificate = read(written(tmp_path / "c", weights=""))
    certificate.check(LAYOUT, Namespace("org/small", LAYOUT, "any").public_label)
    with pytest.raises(UsageError, match="for the model"):
        certificate.check(LAYOUT, Namespace("org/large", LAYOUT).public_label)
    with pytest.raises(UsageError, match="for the model"):
        certificate.check(LAYOUT, Namespace("org/small-instruct", LAYOUT, "any").public_label)
    with pytest.raises(UsageError, match="for the model"):
        certificate.check(LAYOUT, Namespace("org/small/other", LAYOUT).public_label)


def test_a_version_of_the_weights_is_not_the_beginning_of_another(tmp_path: Path) -> None:
    certificate = read(written(tmp_path / "c", weights="0123"))
    certificate.check(LAYOUT, Namespace("org/small", LAYOUT, "0123", (1, 2)).public_label)
    with pytest.raises(UsageError, match="for the model"):
        certificate.check(LAYOUT, Namespace("org/small", LAYOUT, "01234567").public_label)


def test_whoever_gives_no_label_is_not_asked_for_the_model(tmp_path: Path) -> None:
    read(written(tmp_path / "c")).check(LAYOUT, "")
