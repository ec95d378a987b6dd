"""The adapter template is a package for others to copy: its tests run where it is installed (nox -s outside)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("lmcache_template") else ["adapter-template"]
