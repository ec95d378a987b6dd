from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens import Namespace
from lmcache_core.tokens.namespace import label_from

LAYOUT = Layout("bfloat16", (2, 4, 16, 2, 8), "KLTHD")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def test_each_field_alone_makes_another_namespace() -> None:
    base = Namespace("m", LAYOUT)
    others = [
        dataclasses.replace(base, model="n"),
        dataclasses.replace(base, weights_version="2"),
        dataclasses.replace(base, kv_shard=(0, 2)),
        dataclasses.replace(base, kv_shard=(1, 2)),
        dataclasses.replace(base, tenant_salt="s"),
        dataclasses.replace(base, format="s"),
        dataclasses.replace(base, layout=Layout("float16", LAYOUT.shape, "KLTHD")),
        dataclasses.replace(base, layout=Layout("bfloat16", (2, 4, 2, 16, 8), "KLTHD")),
        dataclasses.replace(base, layout=Layout("bfloat16", LAYOUT.shape, "LKTHD")),
        dataclasses.replace(base, layout=Layout("bfloat16", LAYOUT.shape)),
    ]
    everything = [base, *others]
    assert len({namespace.digest for namespace in everything}) == len(everything)
    assert len({namespace.id for namespace in everything}) == len(everything)


@settings(deadline=None)
@given(TEXT, TEXT, TEXT, TEXT, TEXT, TEXT, TEXT, TEXT)
def test_text_that_moves_from_field_to_field_makes_another_namespace(
    model: str, version: str, salt: str, kind: str, model2: str, version2: str, salt2: str, kind2: str
) -> None:
    one = Namespace("m" + model, LAYOUT, version, tenant_salt=salt, format=kind)
    two = Namespace("m" + model2, LAYOUT, version2, tenant_salt=salt2, format=kind2)
    assert (one.digest == two.digest) == (one == two)
    # The harder case: the same text altogether, split elsewhere.
    joined = model + version + salt + kind
    three = Namespace("m" + joined, LAYOUT)
    assert (one.digest == three.digest) == (one == three)


def test_the_tenant_salt_is_in_no_repr_and_in_no_error() -> None:
    salt = "hunter2-\udcff"
    assert "hunter2" not in repr(Namespace("m", LAYOUT, tenant_salt="hunter2"))
    assert "hunter2" not in str(Namespace("m", LAYOUT, tenant_salt="hunter2"))
    with pytest.raises(UsageError, match="tenant_salt") as caught:
        Namespace("m", LAYOUT, tenant_salt=salt)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_namespace_survives_pickling() -> None:
    namespace = Namespace("m", LAYOUT, "2", (1, 4), "salt")
    again = pickle.loads(pickle.dumps(namespace))
    assert again == namespace
    assert again.digest == namespace.digest


@pytest.mark.parametrize("shard", [(0, 0), (1, 1), (-1, 2), (0, 1, 2), [0, 1], (0, 1 << 17), (0.0, 1), (False, True)])
def test_a_kv_shard_that_is_no_part_of_a_whole_is_refused(shard: object) -> None:
    with pytest.raises(UsageError, match="kv_shard"):
        Namespace("m", LAYOUT, kv_shard=shard)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["model", "weights_version", "tenant_salt"])
def test_a_field_that_is_not_text_is_refused_by_name(field: str) -> None:
    with pytest.raises(UsageError, match=field):
        Namespace(**{"model": "m", "layout": LAYOUT, field: b"bytes"})  # type: ignore[arg-type]


def test_an_empty_model_and_a_layout_of_another_type_are_refused() -> None:
    with pytest.raises(UsageError, match="model is empty"):
        Namespace("", LAYOUT)
    with pytest.raises(UsageError, match="give a Layout"):
        Namespace("m", "bfloat16")  # type: ignore[arg-type]


def test_a_label_is_no_part_of_the_namespace() -> None:
    plain, labelled = Namespace("m", LAYOUT), Namespace("m", LAYOUT, label="llama-3-8b/bf16")
    assert plain == labelled
    assert hash(plain) == hash(labelled)
    assert (plain.id, plain.canonical) == (labelled.id, labelled.canonical)
    assert labelled.public_label == "llama-3-8b/bf16"


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("org/model", "org/model@44dd"),
        ("/home/" + "somebody/" * 9 + "model", "somebody/" * 7 + "model@44dd"),
        ("/" + "x" * 74 + "/" + "model", "model@44dd"),
        ("x" * 90, "x" * 75 + "@44dd"),
    ],
)
def test_a_label_from_a_long_path_is_made_of_whole_names(model: str, label: str) -> None:
    assert label_from(model, "@44dd") == label


@pytest.mark.parametrize("label", ["x" * 81, "a\x1b[2J", "a\nb", 'a"b', "a<b>", "模型", 7])
def test_a_label_that_could_do_harm_where_it_is_shown_is_refused(label: Any) -> None:
    with pytest.raises(UsageError, match="label"):
        Namespace("m", LAYOUT, label=label)


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"model": "Qwen/Qwen3-0.6B"}, "Qwen/Qwen3-0.6B/float16"),
        ({"model": "m", "weights_version": "0123456789abcdef", "kv_shard": (1, 4)}, "m@0123456789ab/float16 1/4"),
        ({"model": "m", "tenant_salt": "secret"}, "m/float16"),
        ({"model": "a\x1b]0;owned\x07\n模"}, "a_]0_owned___/float16".replace("]", "_")),
        ({"model": "/mnt/" + "deep/" * 40 + "llama-3-8b"}, "deep/" * 12 + "llama-3-8b/float16"),
    ],
)
def test_the_default_label_is_made_of_what_people_know(fields: dict[str, object], label: str) -> None:
    space = Namespace(**{"layout": Layout("float16", (2, 4)), **fields})
    assert space.public_label == label
    assert Namespace(**{"layout": Layout("float16", (2, 4)), **fields, "label": label}) == space, "it is a label"
