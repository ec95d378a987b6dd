"""Misspelt settings are never dropped silently."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from lmcache_core.errors import SettingsError, printable
from lmcache_core.plugins.suggest import suggestion
from lmcache_core.settings.files import PREFIX
from lmcache_core.settings.model import Settings
from lmcache_core.settings.schema import Schema
from lmcache_core.settings.sources import (
    NAMED_AS_VARIABLES,
    Leaf,
    Origin,
    SettingPath,
    Source,
    dotted,
    from_kubernetes,
    spelled,
)


def take_unknown(sources: Sequence[Source], companions: Collection[str] = ()) -> dict[SettingPath, Leaf]:
    """Remove variables and secrets that are not settings from the sources, and return them for `warnings_about`.
    `companions`: names of tables besides those that every server has.

    The prefix is ours, but anyone may set variables and share a directory of secrets: what is outside all of our
    sections causes a warning, and a variable that Kubernetes injects for a Service does not even cause that.
    """
    taken: dict[SettingPath, Leaf] = {}
    for source in sources:
        if source.origin not in (*NAMED_AS_VARIABLES, Origin.SECRET):
            continue
        for path, leaf in list(source.leaves.items()):
            injected = source.origin is not Origin.SECRET and from_kubernetes(leaf.where, leaf.value)
            ours = path[0] in Settings.model_fields or (path[0] in companions and len(path) > 1)
            if ours and not (injected and len(path) == 2 and path[0] == "l2"):
                continue
            del source.leaves[path]
            if not injected:
                taken[path] = leaf
    return taken


def warnings_about(taken: Mapping[SettingPath, Leaf], schema: Schema) -> list[str]:
    """A line for each variable or secret that is not a setting. Raises SettingsError for one that differs from a
    setting only in its underscores: it was meant as that setting, so a server without it would be wrong."""
    flat = {"_".join(known): known for known in schema}
    wrong, warnings = [], []
    for path, leaf in taken.items():
        origin = Origin.ENVIRONMENT if PREFIX in leaf.where else Origin.SECRET
        meant = flat.get("_".join(part for part in path if part))
        if meant:
            wrong.append((f"{leaf.where} is not a setting", f"write {spelled(meant, origin)}"))
        warnings.append(f"{printable(leaf.where)} is not a setting and is ignored{near(path, schema, origin)}")
    if wrong:
        raise _all_of(wrong)
    return warnings


def check_names(schema: Schema, sources: Iterable[Source]) -> None:
    """Raise SettingsError for every name that is not a setting, with a suggestion for each."""
    problems = []
    for source in sources:
        for path, leaf in source.leaves.items():
            problem = _problem(schema, path, empty=leaf.value in ({}, None))
            if problem is None:
                continue
            what, cure = problem
            name = spelled(path, source.origin)
            where = f" ({leaf.where})" if leaf.where != name else ""
            problems.append((f"{name}{where} is {what}", cure or near(path, schema, source.origin).removeprefix(": ")))
    if problems:
        raise _all_of(problems)


def _all_of(problems: Sequence[tuple[str, str]]) -> SettingsError:
    """One error for all problems. Several cures stand in the message, each after its problem."""
    if len(problems) == 1:
        problem, cure = problems[0]
        return SettingsError(problem, cure=cure)
    return SettingsError("; ".join(f"{problem}: {cure}" if cure else problem for problem, cure in problems))


def _problem(schema: Schema, path: SettingPath, *, empty: bool) -> tuple[str, str] | None:
    """What is wrong with a name that is not a setting, and the cure if it needs no guess."""
    setting = schema.get(path)
    if setting is not None:
        return None
    if path[-1] == "type" and (above := schema.get(path[:-1])) is not None and above.component:
        return None
    if any(
        (above := schema.get(path[:length])) is not None and above.open and not above.component
        for length in range(1, len(path))
    ):
        return None
    if empty and path[0] in ("subscribers", "operations") and len(path) <= 2:  # a component may have no settings
        return None
    below = [known for known in schema if known[: len(path)] == path]
    if below or path == ("l2",):
        if empty:
            return None
        return "a table", f"set one of its settings, as in {dotted(below[0]) if below else 'l2.NAME.type'}"
    return "not a setting", ""


def near(path: SettingPath, known: Iterable[SettingPath], origin: Origin) -> str:
    """A suggestion that ignores the number of underscores, because those are what people get wrong. In a table that
    exists, a single word may be a part of a setting's name."""
    known = list(known)
    if "_" not in path[-1]:
        beside = {each[-1]: each for each in known if each[:-1] == path[:-1]}
        parts = {part: each for name, each in reversed(beside.items()) for part in (*name.split("_"), name)}
        word = suggestion(path[-1], parts)
        if word:
            return f": did you mean {spelled(parts[word.split(chr(39))[1]], origin)!r}?"
    flat = {"_".join(each): each for each in known}
    nearest_text = suggestion("_".join(path), flat)
    if not nearest_text:
        return ""
    nearest = flat[nearest_text.split("'")[1]]
    if path[: len(nearest)] == nearest:  # the prefix is right, and the misspelt part stands below it
        return ""
    return f": did you mean {spelled(nearest, origin)!r}?"
