"""Builds the optional C extension; everything else stands in pyproject.toml.

LMCACHE_CORE_NATIVE: `auto` (default) builds it where a compiler is found and goes on without it otherwise, `require`
fails instead, `off` does not try. LMCACHE_CORE_NATIVE_SANITIZE=address,undefined (or thread) builds it under
sanitizers; run Python with their library preloaded then.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit("lmcache-core needs a Python with its global lock: use python3.13, not python3.13t")

HERE = Path(__file__).parent
MODE = os.environ.get("LMCACHE_CORE_NATIVE", "auto")
if MODE not in ("auto", "require", "off"):
    raise SystemExit(f"LMCACHE_CORE_NATIVE is {MODE!r}: use auto, require or off")

# No instruction set is asked for here: functions ask for theirs by attribute, and the code asks the processor.
flags = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
links = ["-pthread"]
if sanitize := os.environ.get("LMCACHE_CORE_NATIVE_SANITIZE"):
    flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-g", "-O1"]
    links += [f"-fsanitize={sanitize}"]
# The negative control of the torn-read hunt is built from these very files, with one macro.
if defines := os.environ.get("LMCACHE_CORE_NATIVE_DEFINES"):
    flags += [f"-D{name}" for name in defines.split(",")]

NATIVE = Extension(
    "lmcache_core._native",
    sources=sorted(str(path.relative_to(HERE)) for path in (HERE / "native").glob("*.c")),
    include_dirs=["native"],
    # Named here, a header travels in the sdist; without it the optional module would vanish from the wheel.
    depends=sorted(str(path.relative_to(HERE)) for path in (HERE / "native").glob("*.h")),
    extra_compile_args=flags,
    extra_link_args=links,
    optional=MODE == "auto",
)

# Object files say nothing about their flags: those of a special build stand apart, and are made anew.
special = {"build": {"build_base": "build/special"}, "build_ext": {"force": True}} if sanitize or defines else {}

setup(ext_modules=[] if MODE == "off" else [NATIVE], options=special)
