"""Engines that the connector refuses end at their start, with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_engines import Engine, EngineError, Server


@pytest.mark.slow
def test_an_unknown_version_is_refused_unless_one_wants_to_try(
    start: Callable[..., Engine], llama: Path, serve: Callable[..., Server], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import vllm\nvllm.__version__ = '0.34.0'\n")
    settings, other = serve().settings(), {"env": {"PYTHONPATH": str(tmp_path)}}
    with pytest.raises(
        EngineError, match=r"this is vLLM 0\.34\.0, and lmcache-core-vllm knows 0\.32 and 0\.33: install"
    ):
        start(llama, settings, **other)
    tried = start(llama, settings | {"unproven_ok": True}, **other)
    assert tried.generate([1, 2, 3])[0]["tokens"]
