"""Calls as users write them: every argument by place or by name, and what other libraries make of a view."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from lmcache_l0.errors import UsageError


def test_every_argument_may_be_given_by_its_name(make):
    cache = make()
    array = np.arange(128, dtype=np.float32)[:64]
    cache.set(key="k", value=b"v")
    assert cache.get(key="k", default=None) == b"v"
    assert cache.get("absent", default=3) == 3
    cache.set_numpy(key="emb:123", array=array)
    assert np.array_equal(cache.get_numpy("emb:123", shape=(64,), dtype=np.float32), array)
    assert np.array_equal(cache.get_numpy(dtype=np.float32, key="emb:123", shape=64, snapshot=True), array)
    assert bytes(cache.view(key="k", writable=True)) == b"v"
    assert cache.set_many(items={"a": b"1"}) == 1
    assert cache.get_many(keys=["a", "k"]) == [b"1", b"v"]
    out = bytearray(2)
    assert cache.get_many_into(keys=["a", "k"], out=out) == b"\1\1"
    assert out == b"1v"
    ticket = cache.ticket(key="new")
    assert cache.insert(key="new", value=b"n", ticket=ticket)
    assert cache.delete(key="new")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("c.get()", r"get\(key, default=\.\.\.\): an argument is missing"),
        ("c.get('k', 1, 2)", "too many arguments"),
        ("c.get('k', key='k')", "twice the argument 'key'"),
        ("c.get('k', fallback=1)", "no argument 'fallback'"),
        ("c.get_numpy('k', 1, 'u1', True)", r"get_numpy\(key, shape, dtype, \*, writable=.*too many"),
        ("c.get_numpy('k', 1)", "an argument is missing"),
        ("c.set('k')", "an argument is missing"),
        ("c.delete()", "an argument is missing"),
        ("c.insert('k', b'v', 'ticket')", "int"),
    ],
)
def test_a_call_that_makes_no_sense_says_how_it_is_made(make, call, said):
    cache = make()
    with pytest.raises(TypeError, match=said):
        eval(call, {"c": cache})


def test_the_stub_names_every_argument_as_the_module_does(make):
    """By asking the module: a name of the stub that it does not know is an error there."""
    from pathlib import Path

    import lmcache_l0

    stub = Path(lmcache_l0.__file__).with_name("_table.pyi").read_text()
    cache = make()
    for name in ("get", "set", "delete", "view", "get_numpy", "set_numpy", "get_many", "get_many_into", "set_many"):
        with pytest.raises(TypeError) as caught:
            getattr(cache, name)(nonsense=1)
        signature = str(caught.value).split("(", 1)[1].split(")")[0]
        for argument in signature.replace("*, ", "").split(", "):
            assert f"{argument.split('=')[0]}: " in stub


def test_numpy_takes_a_view_by_dlpack(make):
    cache = make()
    cache.set_numpy("k", np.arange(8.0))
    view = cache.get_numpy("k", 8, "f8")
    assert np.from_dlpack(view).tolist() == list(range(8))
    assert inspect.signature(type(view).__dlpack__)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def test_torch_takes_a_view_by_dlpack_without_a_copy(make, torch):
    cache = make()
    cache.set_numpy("k", np.arange(8, dtype=np.float32))
    view = cache.get_numpy("k", (2, 4), "f4")
    tensor = torch.from_dlpack(view)
    assert tensor.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert tensor.data_ptr() == view.ctypes.data
    del view
    cache.close()
    assert tensor.sum() == 28  # it keeps the mapping


def test_a_tensor_of_the_tables_memory_knows_when_it_has_ended(make, torch):
    cache = make(versions=1)
    cache.set_numpy("emb", np.arange(8, dtype=np.float32))
    tensor = cache.get_torch("emb", shape=(2, 4), dtype=torch.float32)
    copy = cache.get_torch("emb", (8,), torch.float32, snapshot=True)
    assert tensor.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert tensor.valid()
    for i in range(2):
        cache.set_numpy("emb", np.full(8, i, np.float32))
    assert not tensor.valid()
    assert copy.valid()
    assert copy.tolist() == list(range(8))
    assert cache.get_torch("absent", (8,), torch.float32) is None
    with pytest.raises(UsageError, match="was stored as <f4"):
        cache.get_torch("emb", (8,), torch.int32)


def test_a_tensor_of_a_read_only_table_has_its_own_memory(make, torch):
    """torch knows no read-only tensors: a write in place must not end the process."""
    cache = make()
    cache.set_numpy("emb", np.zeros(8, np.float32))
    tensor = make(cache.path, read_only=True).get_torch("emb", (8,), torch.float32)
    tensor += 1
    assert cache.get_torch("emb", (8,), torch.float32).tolist() == [0] * 8


def test_types_that_numpy_has_not_are_read_as_torch_knows_them(make, torch):
    cache = make()
    tensor = torch.arange(8, dtype=torch.bfloat16)
    cache.set("raw", tensor.view(torch.uint8).numpy())
    cache.set_numpy("words", tensor.view(torch.uint16).numpy())
    for key in ("raw", "words"):
        assert cache.get_torch(key, 8, torch.bfloat16).tolist() == list(range(8))


JAX = """
import sys
import jax
import numpy as np
from lmcache_l0 import SharedCache
cache = SharedCache(sys.argv[1], create=False)
cache.set_numpy("k", np.arange(8, dtype=np.float32))
view = cache.get_numpy("k", (2, 4), np.float32)
snapshot = cache.get_numpy("k", (2, 4), np.float32, snapshot=True)
arrays = [jax.dlpack.from_dlpack(view), jax.numpy.asarray(view), jax.jit(lambda a: a)(view), jax.device_put(snapshot)]
assert [array.shape for array in arrays] == [(2, 4)] * 4
for i in range(2):
    cache.set_numpy("k", np.full(8, i, np.float32))
assert not view.valid()
for array in arrays:
    assert array.ravel().tolist() == list(range(8)), array
"""


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: nox -s jax tests it")
def test_jax_takes_a_view_as_a_copy_that_nobody_overwrites(make):
    """jax counts on it that arrays never change. Its device_put takes memory as it lies: give it a snapshot. (In a
    process of its own, for jax has threads, and other tests fork.)"""
    done = subprocess.run(
        [sys.executable, "-c", JAX, make(versions=1).path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
