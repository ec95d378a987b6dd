"""`lmcache-core completion`: the script with which a shell completes command lines: commands, options, settings as
flags, files, and the names of what there is (tiers, namespaces, plugins, policies, tenants). And the manual page, of
the same parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lmcache_core import __version__
from lmcache_core.cli.lazy import CommandParser, LazyParser
from lmcache_core.errors import CacheError, printable
from lmcache_core.plugins.components import Kind

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry

SHELLS = ("bash", "zsh", "fish", "tcsh")
MAN = "man"  # in place of a shell: the manual page
VALUES = "values"  # in place of a shell: what the scripts ask while somebody types
ASK_S = 2.0  # for a server that does not answer, a person waits no longer
FILES = {"FILE", "PATH", "TRACE", "OUTPUT", "PNG"}  # of an argument's metavar
# An argument's metavar → what is asked for.
NAMES = {"TIER": "tiers", "STORE": "stores", "TENANT": "tenants", "ID": "namespaces", "PLUGIN": "plugins",
         "POLICY": "policies"}  # fmt: skip
POLICIES = {
    "l1.eviction": Kind.EVICTION_POLICY,
    "store_policy": Kind.STORE_POLICY,
    "prefetch_policy": Kind.PREFETCH_POLICY,
}

# The functions that ask: the rest of the command line says which server. Each line is a value, a tab, and a text.
_PREAMBLE = {
    "bash": """
_lmcache_core_values() {
  compgen -W "$("${COMP_WORDS[0]}" completion values "$1" "${COMP_WORDS[@]:1}" 2>/dev/null | cut -f1)" -- "$2"
}
""",
    "zsh": """
_lmcache_core_values() {
  local line; local -a all values texts
  all=("${(@Q)${(z)BUFFER}}")  # `words` begins with the innermost action
  all=("${(@)all[${all[(i)*lmcache-core]},-1]}")
  for line in "${(@f)$("${all[1]}" completion values "$1" "${(@)all[2,-1]}" 2>/dev/null)}"; do
    [[ -n "$line" ]] && values+=("${line%%$'\\t'*}") && texts+=("${line//$'\\t'/  }")
  done
  compadd -d texts -a values
}
""",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    choices = f"{{{','.join([*SHELLS, MAN])}}}"
    parser.usage = f"{parser.prog} [-h] {choices}"
    parser.epilog = (
        'bash: source <(lmcache-core completion bash). zsh, after compinit: eval "$(lmcache-core completion zsh)". '
        "fish: lmcache-core completion fish | source."
    )
    parser.add_argument("shell", choices=[*SHELLS, MAN, VALUES], metavar=choices)
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print the script, the values that it asks for, or the man page; returns 0."""
    if arguments.shell == VALUES:
        kind, *words = arguments.words or [""]
        for value, text in _values(arguments.registry, kind, words):
            print(f"{value}\t{printable(text)}" if text else value)
        return 0
    if arguments.words:
        arguments.command_parser.error(f"unrecognized arguments: {' '.join(arguments.words)}")
    shell: str = arguments.shell
    if shell == MAN:
        from argparse_manpage.manpage import Manpage

        page = Manpage(whole_parser(arguments.registry))
        page.source, page.manual = f"lmcache-core {__version__}", "lmcache-core"
        print(page)
        return 0
    import shtab

    functions = "".join(_function(kind, shell) for kind in sorted(set(NAMES.values())))
    parser = whole_parser(arguments.registry)
    print(shtab.complete(parser, shell, preamble=_PREAMBLE.get(shell, "") + functions))
    return 0


# --- the parser, with what completes each argument ------------------------------------------------------------------


def whole_parser(registry: Registry) -> argparse.ArgumentParser:
    """The command line, including everything that is otherwise loaded late."""
    from lmcache_core.cli.main import build_parser

    parser = build_parser(registry)
    _load(parser, list(_flags(registry)))
    return parser


def _load(parser: argparse.ArgumentParser, settings: list[tuple[str, dict[str, Any]]]) -> None:
    if isinstance(parser, LazyParser):
        parser.load()
    if parser.get_default("takes_settings"):
        for flag, options in settings:
            parser.add_argument(flag, **options)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for pseudo in action._choices_actions:  # those that the help lists
                _load(action.choices[pseudo.dest], settings)
        elif not action.choices:
            _complete(action)


def _complete(action: argparse.Action) -> None:
    """Say what completes the argument, where shtab looks for it."""
    import shtab

    name = str(action.metavar or action.dest.upper())
    if name in FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif name == "DIR":
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif name in NAMES:
        kind = NAMES[name]
        action.complete = {  # type: ignore[attr-defined]
            "bash": f"_lmcache_core_{kind}",
            "zsh": f"_lmcache_core_{kind}",
            "fish": f"(lmcache-core completion values {kind} (commandline -opc)[2..-1] 2>/dev/null)",
        }


def _function(kind: str, shell: str) -> str:
    """A function without a number, as shtab calls it."""
    return f'_lmcache_core_{kind}() {{ _lmcache_core_values {kind} "$@"; }}\n' if shell in _PREAMBLE else ""


def _flags(registry: Registry) -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings of any server, without tiers: users choose the names of those. Paths are files, policies have their
    names."""
    from lmcache_core.settings.compose import prepare
    from lmcache_core.settings.sources import dotted

    schema, _, _ = prepare(registry, [])
    for setting in schema.values():
        name = dotted(setting.path)
        options: dict[str, Any] = {"help": setting.description.replace("%", "%%")}
        choices = setting.type_text.split("|")
        if name in POLICIES:
            options["choices"] = [spec.name for spec in _components(registry) if spec.kind is POLICIES[name]]
            yield f"--{name}.type", options  # the same, where other settings of the policy follow
        elif "path" in choices:
            options["metavar"] = "DIR" if name.endswith(("_dir", ".dir")) else "FILE"
        elif len(choices) > 1 and not {"none", "text"} & set(choices):
            options["choices"] = choices
        yield f"--{name}", options


def _components(registry: Registry) -> Iterator[Any]:
    for record in registry.plugins:
        yield from record.components


# --- the names of what there is ------------------------------------------------------------------------------------


def _values(registry: Registry, kind: str, words: list[str]) -> Iterator[tuple[str, str]]:
    """Values and what they are, for one kind of argument of a command line that goes on with `words`. None where the
    server cannot be asked: whoever completes wants no errors."""
    if kind == "plugins":
        for record in registry.plugins:
            yield record.name, record.info.summary
            yield from ((spec.name, spec.summary) for spec in record.components if spec.name != record.name)
    elif kind == "policies":
        yield from ((spec.name, spec.summary) for spec in _components(registry) if spec.kind is Kind.EVICTION_POLICY)
    elif kind in NAMES.values():
        yield from _of_server(kind, words)


def _of_server(kind: str, words: list[str]) -> Iterator[tuple[str, str]]:
    from lmcache_core.cli import connecting
    from lmcache_core.observe.readable import size

    parser = CommandParser(add_help=False, allow_abbrev=False)
    connecting.add_options(parser)
    try:
        where, _ = parser.parse_known_args(words)
        where.setting_flags = []
        with connecting.connect(where, "completion", call_timeout_s=ASK_S) as client:
            status: Mapping[str, Any] = client.status()
    except (CacheError, OSError):
        return
    if kind == "namespaces":
        yield from ((name, row["label"]) for name, row in status["namespaces"].items())
    elif kind == "tenants":
        yield from ((row["name"], "") for row in status["l1"]["tenants"] if row["name"])
    else:
        if kind == "stores":
            yield "l1", "the pool"
        for tier in (status["tiers"] or {}).get("tiers", []):
            yield tier["name"], f"{tier['objects']:,} objects, {size(tier['bytes_used'])}"
