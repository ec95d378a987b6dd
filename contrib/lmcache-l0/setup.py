"""The C extension; everything else stands in pyproject.toml.

LMCACHE_CORE_L0_SANITIZE=address,undefined builds it under sanitizers (run Python with the sanitizer's library
preloaded). No instruction-set flags: one build runs on every machine of its architecture.
"""

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit("lmcache-l0 needs a Python with its global lock: use python3.13, not python3.13t")

HERE = Path(__file__).parent
flags = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-Wall", "-Wextra"]
links = []
if sanitize := os.environ.get("LMCACHE_CORE_L0_SANITIZE"):
    flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g", "-O1"]
    links += [f"-fsanitize={sanitize}"]
# The negative control of the torn-read tests is built by them, from this file, with one macro.
if defines := os.environ.get("LMCACHE_CORE_L0_DEFINES"):
    flags += [f"-D{name}" for name in defines.split(",")]

setup(
    ext_modules=[
        Extension(
            "lmcache_l0._table",
            sources=["native/table.c"],
            include_dirs=["native"],
            # Named, so that they are in the sdist and a change of one rebuilds the module.
            depends=sorted(str(path.relative_to(HERE)) for path in (HERE / "native").glob("*.h")),
            extra_compile_args=flags,
            extra_link_args=links,
        )
    ]
)
