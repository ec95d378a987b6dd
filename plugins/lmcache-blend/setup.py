"""Builds the C functions; everything else stands in pyproject.toml.

LMCACHE_CORE_BLEND_NATIVE: `auto` (default) builds them where a compiler is found, `require` fails without one,
`off` does not try. Without them the package only says so.
"""

from __future__ import annotations

import os
import sysconfig

from setuptools import Extension, setup

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit("lmcache-blend needs a Python with its global lock: use python3.13, not python3.13t")

MODE = os.environ.get("LMCACHE_CORE_BLEND_NATIVE", "auto")
if MODE not in ("auto", "require", "off"):
    raise SystemExit(f"LMCACHE_CORE_BLEND_NATIVE is {MODE!r}: use auto, require or off")

# All builds give the same bytes; and comparisons of floats are vectorised, since nobody waits for their traps.
EXACT = ["-ffp-contract=off", "-fno-trapping-math"]
NATIVE = Extension(
    "lmcache_blend._native",
    sources=[f"src/lmcache_blend/native/{name}.c" for name in ("module", "plain", "avx2")],
    # Named here, headers travel in the sdist; without it the optional module would vanish from the wheel.
    depends=["src/lmcache_blend/native/kernels.h", "src/lmcache_blend/native/blend.h"],
    # No instruction set is asked for here: avx2.c asks function by function, and module.c asks the processor.
    # The stable ABI: one wheel serves every Python from 3.11 on. Calls into it are few, one for a batch of objects.
    py_limited_api=True,
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    extra_compile_args=["-O3", "-std=c11", "-fvisibility=hidden", "-Wall", "-Wextra", *EXACT],
    optional=MODE == "auto",
)

off = MODE == "off"
setup(ext_modules=[] if off else [NATIVE], options={} if off else {"bdist_wheel": {"py_limited_api": "cp311"}})
