"""`lmcache-core explain`: where keys are, or why they are not there."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.cli import connecting
from lmcache_core.cli.table import print_table
from lmcache_core.errors import UsageError
from lmcache_core.textfiles import read_text_file

if TYPE_CHECKING:
    from lmcache_core.client.why.explaining import KeyExplanation
    from lmcache_core.pool.layout import Layout
    from lmcache_core.tokens.namespace import Namespace

_KEY_DIGITS_SHOWN = 16  # digits of a key in the table, enough to tell keys apart; --json has all of them


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which keys to explain, and in which namespace."""
    parser.epilog = (
        "Name the namespace either by everything that went into it (--model and the other options), or by its id "
        "(--namespace) and layout. Tokens need the former, because their keys are derived here."
    )
    parser.add_argument("keys", nargs="*", metavar="KEY", help="keys of 64 hexadecimal digits each")
    parser.add_argument("--tokens", metavar="IDS", help="token ids instead, separated by commas or spaces")
    parser.add_argument("--tokens-file", metavar="FILE", help="the same from a file, or from standard input with -")
    parser.add_argument(
        "--chunk-tokens", type=int, metavar="N", help="tokens that make one key (default: the server's chunk_tokens)"
    )
    space = parser.add_argument_group("the namespace")
    space.add_argument("--model", help="the model's name, as the engine passes it")
    space.add_argument("--weights-version", default="", help="the version of its weights, if the engine passes one")
    space.add_argument("--kv-shard", default="0/1", metavar="I/N", help="which part of the KV (default: %(default)s)")
    space.add_argument("--tenant-salt-file", type=Path, metavar="FILE", help="a file with the tenant's salt")
    space.add_argument("--format", default="", help="the engine's name for the format of an opaque layout")
    space.add_argument("--namespace", metavar="ID", help="the namespace's id instead, 16 hexadecimal digits")
    space.add_argument("--dtype", required=True, help="dtype of its objects, for example float16 or uint8")
    space.add_argument("--shape", required=True, metavar="N,N,…", help="shape of one object, in elements")
    space.add_argument(
        "--memory-format", default="", metavar="AXES", help="one letter for each axis, if the layout names them"
    )
    connecting.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list with one object for each key")


def run(arguments: argparse.Namespace) -> int:
    """Ask the server and print; returns 0 whatever was found. Raises DisconnectedError if no server answers."""
    layout = _layout(arguments)
    tokens = _tokens(arguments)
    keys = [_key(text) for text in arguments.keys]
    if bool(keys) == (tokens is not None):
        raise UsageError("give either keys, or token ids with --tokens or --tokens-file")
    if arguments.chunk_tokens is not None and tokens is None:
        raise UsageError("--chunk-tokens is for token ids: give --tokens or --tokens-file")
    if arguments.namespace is not None and (tokens is not None or arguments.model is not None):
        raise UsageError(
            "a namespace id is not enough to derive the keys of tokens: give --model and the other options"
        )
    space = _namespace(arguments, layout) if arguments.namespace is None else _id(arguments.namespace)
    with connecting.connect(arguments, "explain") as client:
        # Before this session registers the namespace. It also raises if no server answers, as the next calls do not.
        known = client.status()["namespaces"]
        if isinstance(space, int):
            found = client.explain_by_id(space, layout, keys)
        else:
            client.register_layout(space)
            found = client.explain(
                keys if tokens is None else None,
                tokens=tokens,
                namespace=space,
                chunk_tokens=arguments.chunk_tokens,
            )
    if arguments.json:
        print(json.dumps([_plain(each) for each in found], indent=2))
    elif not found:
        print("these tokens are less than one chunk, so none of them are cached")
    else:
        print_table(("key", "hit", "where or why not"), [_row(each) for each in found])
        if not found[0].namespace_known:
            print()
            _print_known(known)
        elif tokens is not None and found[0].reason == "never_stored":
            print()
            print(
                "the first chunk was never stored: does the engine make keys of as many tokens (--chunk-tokens), and "
                "of exactly these from the first on?"
            )
    return 0


def _print_known(namespaces: Mapping[str, Mapping[str, Any]]) -> None:
    """What to compare the options with."""
    if not namespaces:
        print("nobody else uses this namespace, and the server knows no other: has an engine connected to it?")
        return
    title = "nobody else uses this namespace: compare model, dtype, shape and the rest with those the server knows"
    rows = [(each["label"], each["layout"], str(each["sessions"]), name) for name, each in namespaces.items()]
    print("Keys of vLLM's blocks come from its own hashes: lmcache-core check --engine vllm says what they missed.")
    print_table(("known namespace", "layout", "sessions", "id"), rows, title=title, right=(2,))


def _row(each: KeyExplanation) -> tuple[str, str, str]:
    text = ", ".join(each.where) if each.hit else f"{each.reason}: {each.why}"
    return each.key.hex()[:_KEY_DIGITS_SHOWN], "yes" if each.hit else "no", text


def _plain(each: KeyExplanation) -> dict[str, Any]:
    return {**asdict(each), "key": each.key.hex()}


def _layout(arguments: argparse.Namespace) -> Layout:
    from lmcache_core.pool.layout import Layout

    try:
        shape = tuple(int(part) for part in arguments.shape.split(","))
    except ValueError:
        raise UsageError(f"--shape {arguments.shape!r}: give whole numbers separated by commas") from None
    return Layout(arguments.dtype, shape, arguments.memory_format)


def _namespace(arguments: argparse.Namespace, layout: Layout) -> Namespace:
    from lmcache_core.tokens.namespace import Namespace

    if arguments.model is None:
        raise UsageError("no namespace given: use --model (and what else went into it), or --namespace with its id")
    part = re.fullmatch(r"(\d+)/(\d+)", arguments.kv_shard)
    if part is None:
        raise UsageError(f"--kv-shard {arguments.kv_shard!r}: write I/N, for example 0/1")
    salt = ""
    if arguments.tenant_salt_file is not None:
        try:
            salt = read_text_file(arguments.tenant_salt_file).removesuffix("\n")
        except (OSError, ValueError) as error:
            raise UsageError(f"--tenant-salt-file {arguments.tenant_salt_file} cannot be read: {error}") from error
    shard = int(part[1]), int(part[2])
    return Namespace(arguments.model, layout, arguments.weights_version, shard, salt, arguments.format)


def _id(text: str) -> int:
    if not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,16}", text):
        raise UsageError(f"--namespace {text!r} is not an id: give its 16 hexadecimal digits")
    return int(text, 16)


def _key(text: str) -> bytes:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise UsageError(f"{text!r} is not a key: give its 64 hexadecimal digits")
    return bytes.fromhex(text)


def _tokens(arguments: argparse.Namespace) -> Sequence[int] | None:
    if arguments.tokens is not None and arguments.tokens_file is not None:
        raise UsageError("give --tokens or --tokens-file, not both")
    text = arguments.tokens
    if arguments.tokens_file == "-":
        text = sys.stdin.read()
    elif arguments.tokens_file is not None:
        try:
            text = read_text_file(Path(arguments.tokens_file))
        except OSError as error:
            raise UsageError(f"--tokens-file {arguments.tokens_file} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"--tokens-file {arguments.tokens_file} is not text: {error}") from error
    if text is None:
        return None
    try:
        return [int(part) for part in re.split(r"[\s,\[\]]+", text) if part]
    except ValueError:
        raise UsageError("token ids must be whole numbers separated by commas or spaces") from None
