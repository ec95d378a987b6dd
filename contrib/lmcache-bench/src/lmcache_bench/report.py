"""The page of all benches: one self-contained HTML file, the same in Markdown, pictures, and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.cli.bench.harness import number

if TYPE_CHECKING:
    from lmcache_bench.all import Figure

WIDTH, ROW, LABEL, RIGHT, TOP = 860, 22, 400, 60, 26
GOOD, BAD, PLAIN, FLOOR = "#2a7f62", "#c0392b", "#4a6fa5", "#888888"
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
td, th { padding: 2px 8px; text-align: right; border-bottom: 1px solid #8884; }
td:first-child, th:first-child { text-align: left; }
svg { width: 100%; height: auto; }
.missed { color: #c0392b; }
"""


def write_report(
    folder: Path, figures: Sequence[Figure], failed: Mapping[str, str], machine: Mapping[str, Any], *, quick: bool
) -> None:
    """index.html, report.md, BENCH.svg and figures.json."""
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        groups.setdefault(figure.bench, []).append(figure)
    facts = facts_of(machine, figures, quick=quick)
    pictures = {name: picture(name, group) for name, group in groups.items()}
    for name, drawn in pictures.items():
        if drawn:
            (folder / f"{name}.svg").write_text(drawn)
    (folder / "figures.json").write_text(
        json.dumps(
            {"machine": dict(machine), "failed": dict(failed), "figures": [asdict(f) for f in figures]}, indent=1
        )
    )
    (folder / "report.md").write_text(_markdown(groups, pictures, failed, facts))
    (folder / "index.html").write_text(_html(groups, pictures, failed, facts))


def facts_of(machine: Mapping[str, Any], figures: Sequence[Figure], *, quick: bool) -> list[str]:
    """What a reader must know to interpret the figures."""
    rounds = max((figure.rounds for figure in figures), default=0)
    return [
        f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores, "
        f"{machine.get('memory', 0) / 2**30:.0f} GiB, Linux {machine.get('kernel', '?')}",
        f"lmcache-core {machine.get('lmcache_core', '?')}, Python {machine.get('python', '?')}",
        f"{datetime.now(UTC):%Y-%m-%d}, {rounds} rounds{', quick' if quick else ''}: medians, "
        "and from the least to the greatest",
        "ratio: ours ÷ the floor or peer beside it, both of the same run; compare ratios, not times",
    ]


def _spread(figure: Figure) -> str:
    low, high = figure.spread
    return f"{number(low)} – {number(high)}"


def _verdict(figure: Figure) -> str:
    return figure.doubt or {True: "yes", False: "no", None: ""}[figure.met]


_COLUMNS = ("figure", "ours", "unit", "floor", "ratio", "from – to", "target", "met")


def _cells(figure: Figure) -> tuple[str, ...]:
    return (
        figure.name, number(figure.value), figure.unit, number(figure.floor), number(figure.ratio), _spread(figure),
        number(figure.target), _verdict(figure),
    )  # fmt: skip


def _markdown(
    groups: Mapping[str, Sequence[Figure]],
    pictures: Mapping[str, str],
    failed: Mapping[str, str],
    facts: Sequence[str],
) -> str:
    lines = ["# What the benches found", "", *(f"- {fact}" for fact in facts), ""]
    for name, group in groups.items():
        lines += [f"## {name}", ""]
        if pictures[name]:
            lines += [f"![{name}: ours beside its floor or peer]({name}.svg)", ""]
        lines += [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in _cells(figure))} |" for figure in group]
        lines.append("")
    if failed:
        lines += ["## Not run", "", *(f"- {name}: {why}" for name, why in failed.items()), ""]
    return "\n".join(lines)


def _html(
    groups: Mapping[str, Sequence[Figure]],
    pictures: Mapping[str, str],
    failed: Mapping[str, str],
    facts: Sequence[str],
) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>What the benches found</title><style>{STYLE}</style><h1>What the benches found</h1><ul>",
        *(f"<li>{escape(fact)}" for fact in facts),
        "</ul>",
    ]
    for name, group in groups.items():
        parts.append(f"<h2 id='{escape(name)}'>{escape(name)}</h2>{pictures[name]}<table><tr>")
        parts += [f"<th>{column}" for column in _COLUMNS]
        for figure in group:
            parts.append("<tr class=missed>" if figure.met is False and not figure.doubt else "<tr>")
            parts += [f"<td>{escape(cell)}" for cell in _cells(figure)]
        parts.append("</table>")
    if failed:
        parts += ["<h2>Not run</h2><ul>", *(f"<li>{escape(f'{n}: {why}')}" for n, why in failed.items()), "</ul>"]
    return "\n".join(parts) + "\n"


def picture(bench: str, figures: Sequence[Figure]) -> str:
    """The figures that have a floor: a dot at the ratio, a line from its lowest to its highest, a mark at the target,
    on a logarithmic scale around the floor. Empty if none has a floor."""
    drawn = [figure for figure in figures if figure.ratio]
    if not drawn:
        return ""
    ends = [end for figure in drawn for end in (*figure.spread, figure.target or 1.0) if end > 0]
    low, high = log10(min(*ends, 0.5)) - 0.05, log10(max(*ends, 2.0)) + 0.05

    def at(ratio: float) -> float:
        return LABEL + (WIDTH - LABEL - RIGHT) * (log10(max(ratio, 1e-9)) - low) / (high - low)

    height = TOP + ROW * len(drawn) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-size="12" '
        f'font-family="system-ui, sans-serif" fill="{FLOOR}"><title>{escape(bench)}: ours ÷ floor or peer</title>',
        f'<line x1="{at(1):.1f}" x2="{at(1):.1f}" y1="{TOP - 6}" y2="{height}" stroke="{FLOOR}"/>',
        f'<text x="{at(1):.1f}" y="14" text-anchor="middle">floor or peer</text>',
    ]
    for row, figure in enumerate(drawn):
        y, ratio = TOP + ROW * row + ROW / 2, figure.ratio or 1.0
        colour = {True: GOOD, False: BAD, None: PLAIN}[None if figure.doubt else figure.met]
        name = figure.name if len(figure.name) <= 60 else f"{figure.name[:59]}…"
        parts.append(f'<text x="{LABEL - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        least, greatest = (at(end) for end in figure.spread)
        parts.append(
            f'<line x1="{least:.1f}" x2="{greatest:.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
            f'<circle cx="{at(ratio):.1f}" cy="{y}" r="4" fill="{colour}"/>'
        )
        if figure.target is not None:
            x = at(figure.target)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 7}" y2="{y + 7}" stroke="{FLOOR}" stroke-dasharray="2"/>'
            )
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y + 4:.1f}">{number(ratio)} ×</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
