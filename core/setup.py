"""Builds the optional C extension; everything else stands in pyproject.toml.

LMCACHE_CORE_NATIVE: `auto` (default) builds it where a compiler is found and goes on without it otherwise, `require`
fails instead, `off` does not try. LMCACHE_CORE_NATIVE_SANITIZE=address,undefined (or thread) builds it under
sanitizers; run Python with their library preloaded then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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

WITHOUT = (
    "lmcache-core is installed without its C extension: a hit costs two calls to the server instead of none, and a "
    "restarted server starts cold. To have it: apt-get install gcc python3-dev, then "
    "pip install --force-reinstall --no-deps --no-cache-dir and the same again"
)


class BuildOrSay(build_ext):
    """Builds the extension; where it is optional and cannot be built, says in one line what that costs."""

    def build_extension(self, ext: Extension) -> None:
        """Of one extension."""
        try:
            super().build_extension(ext)
        except Exception:
            if ext.optional:
                say(WITHOUT)
            raise  # setuptools goes on where it may


def say(line: str) -> None:
    """On standard error, which pip shows with -v alone, and on the terminal of whoever installs, if there is one."""
    sys.stderr.write(f"{line}\n")
    with contextlib.suppress(OSError), Path("/dev/tty").open("w") as terminal:  # a build machine has none
        terminal.write(f"\n{line}\n")


# Object files say nothing about their flags: those of a special build stand apart, and are made anew.
special = {"build": {"build_base": "build/special"}, "build_ext": {"force": True}} if sanitize or defines else {}

setup(ext_modules=[] if MODE == "off" else [NATIVE], options=special, cmdclass={"build_ext": BuildOrSay})
