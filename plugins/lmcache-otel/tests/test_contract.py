"""The package and its tracer under the kit's contracts. What a collector gets: tests/integration/test_tracing.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import context, trace

from lmcache_core.client.tracing import trace_context
from lmcache_core.errors import PluginError, SettingsError
from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import compose, make_settings
from lmcache_otel.settings import OtelSettings
from lmcache_testing import PluginPackageContract, TracerContract

FACTORY, SETTINGS = "lmcache_otel.tracer:otel_tracer", "lmcache_otel.settings:OtelSettings"
OTEL = {"endpoint": "http://127.0.0.1:1", "timeout_s": 0.2}


class TestOtel(TracerContract):
    component = "otel"

    @pytest.fixture
    def tracer_settings(self) -> dict[str, Any]:
        return OTEL


class TestPackage(PluginPackageContract):
    distribution = "lmcache-otel"
    heavy = ("opentelemetry",)


def test_the_current_trace_is_that_of_the_calling_thread() -> None:
    current = trace_context()
    span = trace.NonRecordingSpan(trace.SpanContext(1, 2, False, trace.TraceFlags(1)))
    token = context.attach(trace.set_span_in_context(span))
    elsewhere: list[str] = []
    try:
        thread = threading.Thread(target=lambda: elsewhere.append(current()))
        thread.start()
        thread.join()
        assert current() == f"00-{1:032x}-{2:016x}-01"
    finally:
        context.detach(token)
    assert [*elsewhere, current()] == ["", ""]


def test_an_endpoint_is_a_base_url_also_of_ipv6() -> None:
    assert OtelSettings(endpoint="http://[::1]:4318").traces_url == "http://[::1]:4318/v1/traces"
    for bad in ("http://[::1:4318", "http://host:99999", "http://[::1]:4318?q"):
        with pytest.raises(ValueError, match="base URL"):
            OtelSettings(endpoint=bad)


def test_an_empty_endpoint_in_the_environment_is_none() -> None:
    settings = compose(load_plugins(), environ={"LMCACHE_CORE_OTEL__ENDPOINT": ""}).settings
    assert settings.tracers()["otel"].endpoint is None


def test_a_table_without_the_package_says_what_to_install() -> None:
    without = load_plugins({"LMCACHE_CORE_PLUGINS": ""})
    without.refused.clear()  # as if it was not installed
    with pytest.raises(PluginError, match="pip install lmcache-otel"):
        make_settings(without, otel={"endpoint": "http://127.0.0.1:4318"})


def test_a_client_that_is_to_trace_without_the_package_says_what_to_install() -> None:
    code = "from lmcache_core import Client\nClient.connect('nowhere', trace=True)"
    environ = {**os.environ, "LMCACHE_CORE_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert (
        "UsageError: trace=True needs a package that knows the current trace: pip install lmcache-otel" in done.stderr
    )


def test_a_server_has_one_tracer(tmp_path: Path) -> None:
    class Another:
        @hookimpl
        def lmcache_components(self) -> Sequence[ComponentSpec]:
            return [ComponentSpec(Kind.TRACER, "another", FACTORY, SETTINGS)]

    registry = load_plugins()
    registry.register(Another(), "another")
    values: dict[str, Any] = {"l1": {"size_bytes": 16 << 20, "backing": "memfd"}, "another": OTEL}
    values |= {"runtime_dir": str(tmp_path), "state_dir": str(tmp_path), "otel": OTEL}
    with pytest.raises(SettingsError, match=r"one tracer.*another, otel"):
        Server(make_settings(registry, **values), registry)
