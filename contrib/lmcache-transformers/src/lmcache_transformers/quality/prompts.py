"""Documents and questions about them, for measuring how blending changes answers.

The package carries no text. It makes its documents when it runs, from text that is installed anyway: docstrings of
Python's standard library (PSF licence 2.0), and the licences in Debian's `/usr/share/common-licenses`, which may be
copied verbatim. Questions are made from names in the text. Own ones: a file of JSON lines, each with `documents` (a
list of texts) and `question`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.errors import UsageError

LICENCES = Path("/usr/share/common-licenses")
MODULES = [
    "argparse",
    "ast",
    "asyncio",
    "base64",
    "bisect",
    "bz2",
    "calendar",
    "cmath",
    "code",
    "codecs",
    "collections",
    "concurrent.futures",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "ctypes",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "dis",
    "doctest",
    "email.message",
    "enum",
    "fileinput",
    "fractions",
    "ftplib",
    "functools",
    "gettext",
    "glob",
    "gzip",
    "heapq",
    "hmac",
    "html",
    "http.client",
    "imaplib",
    "importlib.resources",
    "inspect",
    "io",
    "ipaddress",
    "itertools",
    "json",
    "linecache",
    "locale",
    "logging",
    "lzma",
    "mailbox",
    "math",
    "mimetypes",
    "multiprocessing",
    "optparse",
    "os",
    "pathlib",
    "pdb",
    "pickle",
    "platform",
    "plistlib",
    "poplib",
    "pprint",
    "profile",
    "queue",
    "random",
    "re",
    "sched",
    "secrets",
    "selectors",
    "shelve",
    "shlex",
    "shutil",
    "signal",
    "smtplib",
    "socket",
    "socketserver",
    "sqlite3",
    "ssl",
    "statistics",
    "string",
    "struct",
    "subprocess",
    "sys",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "timeit",
    "tokenize",
    "trace",
    "traceback",
    "types",
    "typing",
    "unittest",
    "unittest.mock",
    "urllib.parse",
    "urllib.request",
    "uuid",
    "warnings",
    "wave",
    "weakref",
    "xml.dom.minidom",
    "xml.etree.ElementTree",
    "xmlrpc.client",
    "zipfile",
    "zlib",
]
KINDS = ("apart", "continued", "referring")
_WORDS = ("heron", "otter", "maple", "cobalt", "lantern", "harbour", "saffron", "walnut", "pebble", "thistle")
_CHARACTERS_MIN, _CHARACTERS_MAX = 3, 6  # of a token of English text: cautious estimates for what is long enough


@dataclass(frozen=True)
class Document:
    """`entries`: named parts, in order; a question asks for one of them."""

    title: str
    licence: str
    entries: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return f"# {self.title}\n\n" + "\n\n".join(f"{name}: {text}" for name, text in self.entries)

    def names(self, characters: int) -> list[str]:
        """Of the entries that end within so many characters; at least the first."""
        found: list[str] = []
        end = len(self.title) + 4
        for name, text in self.entries:
            end += len(name) + len(text) + 4
            if found and end > characters:
                break
            found.append(name)
        return found


@dataclass(frozen=True)
class Prompt:
    """`kind`: documents of different texts (apart), consecutive parts of one (continued), or one that can be answered
    from two documents together alone (referring); own: from the user's file. `pieces`: how many documents of as many
    tokens it is cut into; None: each document is taken whole, in chunks."""

    kind: str
    documents: tuple[str, ...]
    question: str
    pieces: int | None = None

    def chunks(self, tokenize: Callable[[str], list[int]], tokens: int) -> list[list[int]]:
        """The documents as chunks of at most `tokens` ids."""
        ids = [tokenize(each) for each in self.documents]
        if self.pieces is None:
            return [each[at : at + tokens] for each in ids for at in range(0, len(each), tokens)]
        if self.kind == "continued":
            return [ids[0][at * tokens : (at + 1) * tokens] for at in range(self.pieces)]
        return [each[:tokens] for each in ids]


def shipped() -> list[Document]:
    """Documents of what is installed here, each of at least a thousand characters."""
    return [each for each in (*_of_python(), *_of_licences()) if len(each.text) >= 1000]


def _of_python() -> Iterator[Document]:
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # an optional part of Python
            continue
        public = getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]
        entries = []
        for each in sorted(public):
            item = getattr(module, each, None)
            text = inspect.getdoc(item) if callable(item) else None
            if text and len(text) >= 100 and getattr(item, "__module__", name) not in ("builtins", "typing"):
                entries.append((f"{name}.{each}", text))
        if entries:
            yield Document(f"The Python module {name}", "PSF-2.0", tuple(entries))


def _of_licences() -> Iterator[Document]:
    for file in sorted(LICENCES.glob("*")):
        if file.is_symlink():
            continue
        parts = [" ".join(each.split()) for each in file.read_text(errors="replace").split("\n\n")]
        entries = [(" ".join(each.split()[:4]), each) for each in parts if len(each) >= 150]
        if entries:
            yield Document(f"The licence {file.name}", "verbatim copies permitted", tuple(entries))


def make_prompts(documents: Sequence[Document], kind: str, count: int, pieces: int, tokens: int) -> list[Prompt]:
    """`count` prompts of `pieces` documents each, long enough to be cut to `tokens` tokens. The same ones for the same
    arguments. Raises `UsageError` where there is not text enough."""
    chance = random.Random(f"{kind} {pieces} {tokens}")
    least = _CHARACTERS_MAX * tokens
    long = [each for each in documents if len(each.text) >= least * (pieces if kind == "continued" else 1)]
    if len(long) < (1 if kind == "continued" else pieces):
        raise UsageError(f"there are {len(long)} texts of {least:,} characters, and {pieces} are needed: give your own")
    make = {"apart": _apart, "continued": _continued, "referring": _referring}[kind]
    return [make(chance, long, pieces, tokens) for _ in range(count)]


def _apart(chance: random.Random, documents: Sequence[Document], pieces: int, tokens: int) -> Prompt:
    picked = chance.sample(documents, pieces)
    name = chance.choice(chance.choice(picked).names(_CHARACTERS_MIN * tokens))
    return Prompt("apart", tuple(each.text for each in picked), f"What do the documents say about {name}?", pieces)


def _continued(chance: random.Random, documents: Sequence[Document], pieces: int, tokens: int) -> Prompt:
    document = chance.choice(documents)
    length = _CHARACTERS_MAX * tokens * pieces
    start = chance.randrange(max(1, len(document.text) - length))
    text = document.text[start : start + length]
    return Prompt("continued", (text,), f"What does this text say that {document.title} is for?", pieces)


def _referring(chance: random.Random, documents: Sequence[Document], pieces: int, tokens: int) -> Prompt:
    picked = chance.sample(documents, pieces)
    asked, other = chance.sample(range(pieces), 2) if pieces > 1 else (0, 0)
    name = chance.choice(picked[asked].names(_CHARACTERS_MIN * tokens))
    word = chance.choice(_WORDS)
    texts = [each.text for each in picked]
    texts[other] = f"In all of these documents, {name} goes by the name {word}.\n\n{texts[other]}"
    return Prompt("referring", tuple(texts), f"What does {word} do, and what is its real name?", pieces)


def read_prompts(path: Path) -> list[Prompt]:
    """Of a file of JSON lines. Raises `UsageError` that names the line."""
    prompts = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_prompt(path, number, line))
    if not prompts:
        raise UsageError(f"{path} has no prompt: write a JSON object with documents and question on each line")
    return prompts


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        given: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path}, line {number}: {error}") from error
    documents = given.get("documents") if isinstance(given, dict) else None
    question = given.get("question") if isinstance(given, dict) else None
    texts = isinstance(documents, list) and documents and all(isinstance(each, str) and each for each in documents)
    if not texts or not isinstance(question, str) or not question:
        raise UsageError(f"{path}, line {number}: give documents, a list of texts, and question, a text")
    assert isinstance(documents, list)
    return Prompt("own", tuple(documents), question)
