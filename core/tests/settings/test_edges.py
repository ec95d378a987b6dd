"""Paths, addresses and text files as people write them: one rule each, for every setting."""

import codecs
import socket
from pathlib import Path

import pytest
import zmq
from pydantic import BaseModel

from lmcache_core.client.client import Client
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.paths import absolute_path, path_or_none
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.protocol.address import check_address, runtime_root
from lmcache_core.protocol.hostport import HostPort, needs_ipv6, same_host
from lmcache_core.settings.compose import compose
from lmcache_core.settings.model import Section, Settings, default_state_dir
from lmcache_core.settings.paths import AbsolutePath, OptionalPath
from lmcache_core.settings.schema import fields_of, parts
from lmcache_core.textfiles import read_text_file

REGISTRY = load_plugins()


def models() -> dict[str, type[BaseModel]]:
    """Every settings model of core, and of whatever is installed beside it."""
    found: dict[str, type[BaseModel]] = {"core": Settings}
    for kind in Kind:
        for spec in REGISTRY.components(kind):
            model = REGISTRY.settings_model(kind, spec.name)
            if model is not None:
                found[f"{kind}.{spec.name}"] = model
    return found


PATHS = [
    (where, setting.path, model)
    for where, model in models().items()
    for setting in fields_of(model)
    if Path in parts(setting.annotation)
]


def validated(model: type[BaseModel], path: tuple[str, ...], value: str) -> object:
    """What one setting makes of a text, without the checks of the settings beside it."""
    for part in path[:-1]:
        model = model.model_fields[part].annotation
    field = model.model_fields[path[-1]]
    alone = type("Alone", (Section,), {"__annotations__": {"it": field.rebuild_annotation()}})
    return alone(it=value).it


@pytest.mark.parametrize(("where", "path", "model"), PATHS, ids=[f"{w}:{'.'.join(p)}" for w, p, _ in PATHS])
def test_every_path_setting_expands_the_home_and_refuses_relative_paths(where, path, model, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/somebody")
    home = Path("/home/of/somebody/x")
    assert validated(model, path, "~/x") in (home, (home,))  # one path, or a list of them
    with pytest.raises(ValueError, match="relative"):
        validated(model, path, "x/y")


def test_a_path_is_read_from_json_as_helpers_read_their_settings():
    class Model(BaseModel):
        needed: AbsolutePath
        unset: OptionalPath = None

    said = Model(needed="/cache", unset="/token").model_dump_json()
    assert Model.model_validate_json(said) == Model(needed="/cache", unset="/token")
    assert Model.model_validate_json('{"needed": "/cache", "unset": ""}').unset is None


def test_there_are_path_settings_in_core_and_in_plugins():
    assert {("core", ("runtime_dir",)), ("core", ("zmq", "ipc"))} <= {(where, path) for where, path, _ in PATHS}
    pytest.importorskip("lmcache_fs")
    assert any(where == "l2_adapter.fs" for where, _, _ in PATHS)


def test_an_empty_variable_leaves_the_weaker_source_or_the_default_in_force(tmp_path):
    file = tmp_path / "lmcache.toml"
    file.write_text(f'state_dir = "{tmp_path}/state"\nzmq.curve_secret_key_file = ""\n')
    environ = {
        "LMCACHE_CORE_STATE_DIR": "",
        "LMCACHE_CORE_RUNTIME_DIR": " ",
        "LMCACHE_CORE_ZMQ__IPC": "",
        "LMCACHE_CORE_ZMQ__TCP": "",
        "LMCACHE_CORE_ZMQ__CURVE_CLIENTS_DIR": "",
    }
    composed = compose(REGISTRY, environ=environ, config_path=file)
    settings = composed.settings
    assert settings.state_dir == tmp_path / "state"
    assert str(composed.origins["state_dir"]).startswith("file")
    zmq = settings.zmq
    assert (settings.runtime_dir, zmq.curve_secret_key_file, zmq.curve_clients_dir) == (None, None, None)
    assert (settings.zmq.ipc, settings.zmq.tcp) == (False, None)
    assert str(composed.origins["runtime_dir"]) == "default"


def test_an_empty_path_of_a_tier_is_a_missing_one():
    pytest.importorskip("lmcache_fs")
    with pytest.raises(SettingsError, match=r"l2\.d\.path is missing"):
        compose(REGISTRY, ["--l2.d.type", "fs", "--l2.d.path="], {})


@pytest.mark.parametrize("bad", ["", "  ", "a/b", "./a", "~nobody-has-this-name/a", "/a\0b", "/a\x1b[2J"])
def test_what_is_no_absolute_path_is_refused(bad):
    with pytest.raises(ValueError, match=r"empty|relative|expanded|control"):
        absolute_path(bad)


def test_an_unset_path_is_none():
    assert path_or_none(None) is path_or_none("") is path_or_none(" ") is None


def test_clients_read_the_runtime_directory_by_the_same_rule(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/somebody")
    monkeypatch.setenv("LMCACHE_CORE_RUNTIME_DIR", "~/run")
    assert runtime_root() == Path("/home/of/somebody/run")
    monkeypatch.setenv("LMCACHE_CORE_RUNTIME_DIR", "run")
    with pytest.raises(UsageError, match=r"LMCACHE_CORE_RUNTIME_DIR.*relative"):
        runtime_root()
    monkeypatch.setenv("LMCACHE_CORE_RUNTIME_DIR", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative/counts/as/unset")
    assert str(runtime_root()).startswith("/tmp/lmcache-core-")
    with pytest.raises(UsageError, match="relative"):
        Client.connect("a", runtime_dir="run")


def test_a_relative_home_is_no_place_for_state(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", "")
    assert str(default_state_dir()).startswith("/var/tmp/lmcache-core-")


# --- addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:1", "127.0.0.1", 1), ("[::1]:65535", "::1", 65535), ("*:0", "*", 0), ("a-b.c:7", "a-b.c", 7)],
)
def test_an_address_is_read_and_written_back(text, host, port):
    assert HostPort.parse(text) == (host, port)
    assert str(HostPort.parse(text)) == text


@pytest.mark.parametrize(
    "bad", ["", ":1", "h", "h:", "h:65536", "h:-1", "::1:80", "[::1]", "[::1:80", "[h]:1", "u:p@h:1", "h:1/", " h:1"]
)
def test_what_is_no_address_is_refused(bad):
    with pytest.raises(ValueError, match=r"HOST:PORT|\[::1\]:5555"):
        HostPort.parse(bad)


def test_brackets_and_long_forms_name_the_same_host():
    assert same_host("[0:0:0:0:0:0:0:1]") == same_host("::1")
    assert same_host("LOCALHOST") == "localhost"


def test_only_endpoints_of_ipv6_ask_for_it():
    assert needs_ipv6("tcp://[::1]:5555")
    assert not any(map(needs_ipv6, ("tcp://127.0.0.1:5555", "tcp://*:5555", "ipc:///run/a", "tcp://localhost:5555")))


def test_every_setting_of_an_address_takes_ipv6():
    assert check_address("tcp://[::1]:5555")


def test_a_zmq_socket_listens_on_ipv6_where_its_endpoint_says_so():
    from lmcache_core.protocol.hostport import allow_ipv6

    if not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    with zmq.Context() as context, context.socket(zmq.REP) as server, context.socket(zmq.REQ) as client:
        try:
            allow_ipv6(server, "tcp://[::1]:1")
            server.bind("tcp://[::1]:*")
        except zmq.ZMQError:
            pytest.skip("no IPv6 on this machine")
        at = server.getsockopt_string(zmq.LAST_ENDPOINT)
        allow_ipv6(client, at)
        client.linger = server.linger = 0
        client.connect(at)
        client.send(b"?")
        assert server.poll(10_000)
        assert server.recv() == b"?"


# --- text files ---------------------------------------------------------------------------------------------


def test_a_byte_order_mark_and_line_ends_of_windows_change_nothing(tmp_path):
    file = tmp_path / "lmcache.toml"
    file.write_bytes(codecs.BOM_UTF8 + b'name = "a"\r\n[l1]\r\nsize_bytes = "32MiB"\r\n')
    settings = compose(REGISTRY, environ={}, config_path=file).settings
    assert (settings.name, settings.l1.size_bytes) == ("a", 32 << 20)


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-be", "latin-1"])
def test_a_file_in_another_encoding_is_named_with_the_cure(tmp_path, codec):
    file = tmp_path / "lmcache.toml"
    mark = codecs.BOM_UTF16_BE if codec == "utf-16-be" else b""
    file.write_bytes(mark + 'name = "ä"\n'.encode(codec))
    with pytest.raises(SettingsError, match=rf"{file} .*save it as UTF-8"):
        compose(REGISTRY, environ={}, config_path=file)


def test_text_is_read_without_its_mark(tmp_path):
    file = tmp_path / "token"
    file.write_bytes(codecs.BOM_UTF8 + "wörd\r\n\r".encode())
    assert read_text_file(file) == "wörd\n\n"
