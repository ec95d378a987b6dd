"""The sources of settings: command line, environment, `.env` file, secrets directories, file, a caller's own values.

pydantic-settings reads the files. Each source becomes flat leaves, path → value, so that origins are known and one
check of names covers all of them; `merge` puts them together.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pydantic_settings
from dotenv.parser import parse_stream
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    NestedSecretsSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)

from lmcache_core import limits
from lmcache_core.errors import SettingsError, printable
from lmcache_core.native import BUILD_VARIABLES, MODE_VARIABLE
from lmcache_core.plugins.discovery import ALLOW_LIST
from lmcache_core.plugins.suggest import install_command
from lmcache_core.settings.files import ENV_FILE_VARIABLE, PREFIX
from lmcache_core.textfiles import text_of
from lmcache_core.trust import SERVER_UID_VARIABLE

# Ours, but not settings: they are read from the environment alone, some of them before there are settings.
ELSEWHERE = frozenset({ALLOW_LIST, MODE_VARIABLE, SERVER_UID_VARIABLE, ENV_FILE_VARIABLE, *BUILD_VARIABLES})

# At debug level it logs all values, secrets as well, where PYDANTIC_SETTINGS_DEBUG is set.
logging.getLogger("pydantic_settings").setLevel(logging.WARNING)

SettingPath = tuple[str, ...]


class Origin(StrEnum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    ENV_FILE = "env file"
    GIVEN = "given"  # by a program that embeds the server
    SECRET = "secret"  # a file of a secrets directory
    FILE = "file"
    DEFAULT = "default"


NAMED_AS_VARIABLES = (Origin.ENVIRONMENT, Origin.ENV_FILE)


class Leaf(NamedTuple):
    """One value, and the name under which its source has it. `text`: it is not parsed as its type yet."""

    value: Any
    where: str
    text: bool = False


@dataclass
class Source:
    """Everything from one origin."""

    origin: Origin
    leaves: dict[SettingPath, Leaf] = field(default_factory=dict)


class _Unknown(BaseSettings):
    """For pydantic-settings' sources, before it is known which settings there are."""

    model_config = SettingsConfigDict(case_sensitive=True)


def dotted(path: SettingPath) -> str:
    """`l2.cold.bucket`."""
    return ".".join(path)


def spelled(path: SettingPath, origin: Origin) -> str:
    """How a setting's name is written in that origin."""
    if origin in NAMED_AS_VARIABLES:
        return PREFIX + "__".join(path).upper()
    return f"--{dotted(path)}" if origin is Origin.FLAG else dotted(path)


def read_sources(
    config: Path | None,
    env_file: Path | None,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> list[Source]:
    """Flags, environment, `.env` file and settings file, strongest first. `env_file`: None for the one that the
    environment names, if any. Secrets directories are settings of one of these: composing reads them."""
    named = environ.get(ENV_FILE_VARIABLE, "").strip()
    if env_file is None and named:
        env_file = Path(named)
    return [
        read_flags(flags),
        read_environment(environ),
        read_env_file(_at_home(env_file)),
        read_file(_at_home(config)),
    ]


def _at_home(path: Path | None) -> Path | None:
    """With `~` expanded, which no shell does in a manifest."""
    try:
        return None if path is None else path.expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{path} cannot be read: there is no such home", cure="write the path in full") from error


# --- command line -------------------------------------------------------------------------------------------


def read_flags(argv: Sequence[str]) -> Source:
    """`--l2.cold.bucket=b`, `--l2.cold.bucket b`, and `--zmq.ipc` alone for true."""
    source = Source(Origin.FLAG)
    waiting = list(argv)
    while waiting:
        flag = waiting.pop(0)
        if not flag.startswith("--") or len(flag) == 2:
            raise SettingsError(f"{flag!r} is not a setting", cure="settings look like --l1.size_bytes 8GiB")
        name, given, value = flag.partition("=")
        if not given:
            value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        path = tuple(name[2:].replace("-", "_").split("."))
        if path in source.leaves:
            raise SettingsError(f"{name} is given twice", cure="give it once")
        source.leaves[path] = Leaf(value, name, text=True)
    return source


# --- environment --------------------------------------------------------------------------------------------

_KUBERNETES_NAME = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_KUBERNETES_PORT = re.compile(r"(^|_)PORT$")
_KUBERNETES_URL = re.compile(r"(tcp|udp|sctp)://")


def from_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes sets such a variable in every pod, for a Service called lmcache-core-…"""
    return bool(_KUBERNETES_NAME.search(name) or (_KUBERNETES_PORT.search(name) and _KUBERNETES_URL.match(value)))


def read_environment(environ: Mapping[str, str]) -> Source:
    """`LMCACHE_CORE_L2__COLD__BUCKET`; two underscores separate tables. Names are lower-cased."""
    names = sorted(name for name in environ if name.startswith(PREFIX) and name not in ELSEWHERE)
    _check_once(names)
    return Source(Origin.ENVIRONMENT, {_variable(name): Leaf(environ[name], name, text=True) for name in names})


def _check_once(names: Iterable[str]) -> None:
    """Of two variables that are one setting, nobody could say which counts."""
    seen: dict[SettingPath, str] = {}
    for name in names:
        former = seen.setdefault(_variable(name), name)
        if former != name:
            raise SettingsError(f"{former} and {name} are the same setting", cure="remove one of them")


def _variable(name: str) -> SettingPath:
    return tuple(name[len(PREFIX) :].lower().split("__"))


class _EnvFile(DotEnvSettingsSource):
    """A line that cannot be read is an error and not a warning, and `${…}` stays as it is: passwords contain it."""

    @staticmethod
    def _static_read_env_file(file_path: Path, **_: Any) -> Mapping[str, str | None]:
        found: dict[str, str | None] = {}
        for line in parse_stream(io.StringIO(_text_of(file_path, "the env file"))):
            if line.error or (line.key is not None and line.value is None):
                where = f"the env file {file_path} cannot be read: line {line.original.line}"
                raise SettingsError(f"{where} is not NAME=VALUE", cure="quote a value with spaces or #: NAME='VALUE'")
            if line.key is not None and line.key in found:
                where = f"the env file {file_path}, line {line.original.line}"
                raise SettingsError(f"{where}: {printable(line.key)} is given twice", cure="give it once")
            if line.key is not None:
                found[line.key] = line.value
        _check_once(name for name in found if name.startswith(PREFIX))
        return found


def read_env_file(path: Path | None) -> Source:
    """A `.env` file: lines as `LMCACHE_CORE_L2__COLD__BUCKET=kv`. Other programs' lines are ignored."""
    source = Source(Origin.ENV_FILE)
    if path is None:
        return source
    if not (path.is_file() or path.is_fifo()):
        _text_of(path, "the env file")  # raises what is wrong with it: pydantic-settings takes it for an empty one
    for name, value in _EnvFile(_Unknown, path).env_vars.items():
        if name in ELSEWHERE:
            raise SettingsError(f"{name} in {path} has no effect there", cure="set it in the environment")
        if name.startswith(PREFIX):
            source.leaves[_variable(name)] = Leaf(value, f"{name} in {path}", text=True)
    return source


# --- secrets ------------------------------------------------------------------------------------------------


class _SecretFiles(NestedSecretsSettingsSource):
    """One directory. Files in it that are not ours, as in /run/secrets, are not opened; and what pydantic-settings
    leaves out without a word is an error: folders that it may not list, links to files outside."""

    def __init__(self, directory: Path, sections: Collection[str]) -> None:
        self.leaves: dict[SettingPath, Leaf] = {}
        self._directory, self._sections = directory, sections
        super().__init__(SecretsSettingsSource(_Unknown, secrets_dir=directory), secrets_dir_max_size=sys.maxsize)

    def load_secrets(self, path: Path) -> dict[str, str]:  # type: ignore[override]  # a class method there
        seen: set[Path] = set()
        for folder, folders, files in os.walk(path, onerror=_fail, followlinks=True):
            below = Path(folder).relative_to(path)
            seen.add(self._within(below, path, seen))
            folders[:] = [each for each in folders if (below / each).parts[0] in self._sections]
            for name in files:
                self._take(below / name, path)
        return {}

    def _take(self, name: Path, path: Path) -> None:
        flat, file = ".".join(name.parts), self._directory / name
        at = _variable(flat) if flat.upper().startswith(PREFIX) else tuple(flat.split("."))
        if at in self.leaves:
            raise SettingsError(f"{self.leaves[at].where} and {file} are the same setting", cure="remove one of them")
        if at[0] in self._sections:
            self._within(name, path, ())
            text = _text_of(file, "the secret", limits.SECRET_BYTES_MAX).strip()
            self.leaves[at] = Leaf(text, str(file), text=True)
        elif not flat.startswith("."):  # hidden, as the folders of Kubernetes behind its links
            self.leaves[at] = Leaf("", str(file), text=True)  # only for a warning

    def _within(self, name: Path, path: Path, seen: Collection[Path]) -> Path:
        real = (path / name).resolve()
        if real in seen or not real.is_relative_to(path) or not (real.is_file() or real.is_dir()):
            where = f"the secret {self._directory / name} is not a file within {self._directory}"
            raise SettingsError(where, cure="put it there, not a link to it")
        return real


def _fail(error: OSError) -> None:
    raise error


def read_secrets(directories: Sequence[Path], sections: Collection[str]) -> Source:
    """Directories of files with one value each: `l2.cold.password`, `l2/cold/password`, or named as the variable. The
    last directory wins. `sections`: the first parts of all names of settings."""
    source = Source(Origin.SECRET)
    for directory in directories:
        try:
            os.scandir(directory).close()
            source.leaves.update(_SecretFiles(directory, sections).leaves)
        except OSError as error:
            raise _unreadable(error, "the secrets directory", directory) from error
        except pydantic_settings.SettingsError as error:
            raise SettingsError(f"the secrets directory {directory}: {error}", cure="name one of its own") from error
    return source


# --- file ---------------------------------------------------------------------------------------------------


def read_file(path: Path | None) -> Source:
    """A TOML file, or by its suffix a YAML file. Raises SettingsError if it is missing or not valid."""
    leaves = iter(()) if path is None else _flattened(read_table(path), ())
    source = Source(Origin.FILE)
    for at, value in leaves:
        source.leaves[at] = Leaf(value, str(path))
        if len(source.leaves) > limits.SETTINGS_MAX:  # aliases of YAML make many out of few lines
            raise SettingsError(f"the settings file {path} has more than {limits.SETTINGS_MAX:,} settings")
    return source


def read_table(path: Path) -> Mapping[str, Any]:
    """The tables of a settings file."""
    text: Any = _ReadFile(_text_of(path, "the settings file"))
    kind = "YAML" if path.suffix.lower() in (".yaml", ".yml") else "TOML"
    try:
        if kind == "YAML":
            return _Yaml(_Unknown, yaml_file=text)()
        return TomlConfigSettingsSource(_Unknown, toml_file=text)()
    except ImportError as error:
        cure = f"{install_command('lmcache-core[yaml]')}; or write TOML"
        raise SettingsError(f"the settings file {path} is YAML, and PyYAML is not installed", cure=cure) from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"the settings file {path} is not valid {kind}: {error}") from error


class _Yaml(YamlConfigSettingsSource):
    def _read_file(self, path: Any) -> dict[str, Any]:
        import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

        class OnceEach(yaml.SafeLoader):  # type: ignore[misc]
            """Of equal names in one table PyYAML takes the last, without a word."""

            def compose_mapping_node(self, anchor: Any) -> Any:
                node = super().compose_mapping_node(anchor)
                seen: dict[Any, Any] = {}
                for name, _ in node.value:
                    line = name.start_mark.line + 1
                    if isinstance(name.value, str) and seen.setdefault(name.value, name) is not name:
                        first = seen[name.value].start_mark.line + 1
                        raise ValueError(f"line {line}: {printable(name.value)} is given twice, on line {first} first")
                return node

        try:
            with path.open(encoding="utf-8") as file:
                found = yaml.load(file, OnceEach) or {}
        except yaml.YAMLError as error:  # what it says may contain the value, and that may be a secret
            mark = getattr(error, "problem_mark", None)
            where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
            raise ValueError(f"{where}quote texts, at least those that begin with one of !*&%@`{{[|>") from None
        if not isinstance(found, dict):  # pydantic-settings takes a list of pairs for one
            raise ValueError("it is not a table: write NAME: VALUE")
        return found


class _ReadFile:
    """A file that has been read and checked, for pydantic-settings to read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def is_file(self) -> bool:
        return True

    def open(self, mode: str = "r", encoding: str | None = None) -> io.BytesIO | io.StringIO:
        return io.BytesIO(self._text.encode()) if "b" in mode else io.StringIO(self._text)


def _text_of(path: Path, what: str, bytes_max: int = limits.SETTINGS_FILE_BYTES_MAX) -> str:
    """What a file contains. Raises SettingsError if it cannot be read, is binary, or is too large to be meant."""
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
        text = text_of(content, path)
    except OSError as error:
        raise _unreadable(error, what, path) from error
    except ValueError as error:
        raise SettingsError(f"{what} {error}") from error
    if len(content) > bytes_max:
        raise SettingsError(f"{what} {path} has more than {bytes_max:,} bytes", cure="is it the right file?")
    if "\0" in text:
        raise SettingsError(f"{what} {path} is binary", cure="write text")
    return text


def _unreadable(error: OSError, what: str, path: Path) -> SettingsError:
    cure = ""
    if isinstance(error, PermissionError):
        cure = f"let uid {os.geteuid()} read it; in Kubernetes: fsGroup, and defaultMode 0440"
    return SettingsError(f"{what} {error.filename or path} cannot be read: {error.strerror}", cure=cure)


def read_values(values: Mapping[str, Any]) -> Source:
    """The keyword values of a program that embeds the server."""
    leaves = {at: Leaf(value, dotted(at)) for at, value in _flattened(values, ())}
    return Source(Origin.GIVEN, leaves)


def _flattened(table: Mapping[Any, Any], at: SettingPath) -> Iterator[tuple[SettingPath, Any]]:
    if len(at) > limits.SETTINGS_DEPTH_MAX:  # an alias of YAML may contain itself
        raise SettingsError(
            f"{dotted(at[:4])}… is nested too deeply", cure=f"use at most {limits.SETTINGS_DEPTH_MAX} levels"
        )
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, (*at, str(name)))
        else:
            yield (*at, str(name)), value
