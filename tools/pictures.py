"""Draws what the README shows from figures that are kept beside the pictures, in `docs/pictures/`.

    python tools/pictures.py demo                     # what `lmcache-core demo` finds on this machine
    python tools/pictures.py badges RESULTS.xml COVERAGE.json CARD.json …
    python tools/pictures.py                          # draws all of them again, the gains from docs/pictures/gains.json

`nox -s pictures` and `nox -s badges` make the figures. A test holds that the pictures show what the figures say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent.parent / "docs/pictures"
LETTER, LINE, MARGIN, TEXT = 7.8, 20, 16, 13  # of a monospaced font: width of a letter, a line, the edge, the size
WIDEST = 744  # what a picture may have: the site's text is 688 px wide in a window of 1,280, and text has 12 px or more
STYLE = """<style>
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre; }
.back { fill: #f6f8fa; } .bar { fill: #c8ced6; } .head { fill: #59636e; } .yes { fill: #1a7f37; font-weight: 600; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .back { fill: #161b22; } .bar { fill: #3d444d; } .head { fill: #9198a1; }
.yes { fill: #3fb950; } }
</style>"""
LETTERS = int((WIDEST - 2 * MARGIN) / LETTER)  # of a line
COLUMNS = ("run", "prefix from", "tokens reused", "cold", "warm")
RIGHT = (2, 3, 4)
GREEN, AMBER, RED, GREY = "#1a7f37", "#9a6700", "#cf222e", "#555"


def demo_picture(found: dict[str, Any]) -> str:
    """The table of the demo, as text in an SVG: below each run what it answered."""
    shown = [row for row in found["rows"] if row["cold_s"] is not None]
    rows = [_cells(row) for row in shown]
    widths = [max(len(line[at]) for line in (COLUMNS, *rows)) for at in range(len(COLUMNS))]
    lines = [_line(COLUMNS, widths, "head")]
    for row, cells in zip(shown, rows, strict=True):
        lines.append(_line(cells, widths, ""))
        lines.append(_text("  " + textwrap.shorten(row["answer"], LETTERS - 2, placeholder=" …"), "head"))
    held = sum(check["held"] for check in found["checks"])
    title = (
        "Seconds to the first token of SmolLM2-135M; cold: the whole prompt is computed",
        f"({found['cores']} cores at a load of {found['load']}, {found['date']})",
    )
    last = f"{held} of {len(found['checks'])} claims held; ok: {'yes' if found['ok'] else 'no'}"
    texts = [*(_text(line, "head") for line in title), *lines, _text(last, "yes" if found["ok"] else "head")]
    height = 2 * MARGIN + LINE * len(texts)
    body = "".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * number + TEXT}">{text}</text>\n' for number, text in enumerate(texts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDEST} {height}" role="img" '
        f'aria-label="the table that the demo prints">\n{STYLE}\n'
        f'<rect class="back" width="100%" height="100%" rx="8"/>\n'
        f"{body}</svg>\n"
    )


def gains_picture(rows: Sequence[dict[str, Any]]) -> str:
    """What a user gains, as bars: ours, of what it is compared with."""
    left, bar, line = 290, 330, 46
    body = ""
    for number, row in enumerate(rows):
        top = MARGIN + line * number
        ours = max(2, round(bar * row["with"] / row["without"]))
        figures = f"{row['with']:g} {row['unit']} instead of {row['without']:g} ({row['than']})"
        body += (
            f'<text x="{MARGIN}" y="{top + TEXT}">{escape(row["what"])}</text>\n'
            f'<rect class="bar" x="{left}" y="{top}" width="{bar}" height="16"/>'
            f'<rect fill="{GREEN}" x="{left}" y="{top}" width="{ours}" height="16"/>\n'
            f'<text class="head" x="{left}" y="{top + 16 + TEXT}">{escape(figures)}</text>\n'
        )
    width, height = left + bar + MARGIN, 2 * MARGIN + line * len(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="what a user gains: times with the cache, of those without">\n{STYLE}\n'
        f'<rect class="back" width="100%" height="100%" rx="8"/>\n{body}</svg>\n'
    )


def hits_picture(panels: Sequence[dict[str, Any]]) -> str:
    """Hit rates by capacity: a panel for each trace, with its best fixed policy, `adaptive` and the optimum."""
    left, width, height, gap = MARGIN + 40, WIDEST - 2 * MARGIN - 60, 130, 74
    colours = {"optimum": "#8c959f", "adaptive": GREEN, "best fixed policy": "#0969da"}
    body = ""
    for number, panel in enumerate(panels):
        top = MARGIN + LINE + number * (height + gap)
        capacities, most = panel["capacities"], max(panel["hit_rates"]["optimum"])
        steps = [left + width * at / (len(capacities) - 1) for at in range(len(capacities))]
        body += f'<text x="{MARGIN}" y="{top - 8}">{escape(panel["trace"])}</text>\n'
        body += f'<rect class="bar" x="{left}" y="{top + height}" width="{width}" height="1"/>\n'
        for x, capacity in zip(steps, capacities, strict=True):
            body += (
                f'<text class="head" x="{x:.0f}" y="{top + height + TEXT + 4}" text-anchor="middle">{capacity:,}</text>'
            )
        body += "\n"
        for at, (name, colour) in enumerate(colours.items()):
            rates = panel["hit_rates"][name]
            heights = [top + height * (1 - rate / most) for rate in rates]
            points = " ".join(f"{x:.0f},{y:.0f}" for x, y in zip(steps, heights, strict=True))
            body += f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>\n'
            if not number:
                x = left + 150 + 160 * at
                body += f'<text x="{x}" y="{top - 8}" style="fill:{colour}">{escape(name)}</text>\n'
        body += f'<text class="head" x="{MARGIN}" y="{top + TEXT}">{most:.2f}</text>\n'
    height = MARGIN + LINE + len(panels) * (height + gap)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDEST} {height}" role="img" '
        f'aria-label="hit rates by capacity in blocks, on three traces">\n{STYLE}\n'
        f'<rect class="back" width="100%" height="100%" rx="8"/>\n{body}</svg>\n'
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    cold, warm = ("" if row[name] is None else f"{row[name]:.2f}" for name in ("cold_s", "warm_s"))
    reused = f"{row['tokens_reused']} of {row['tokens_prompt']}"
    return row["run"], row["source"], reused, cold, warm


def _line(cells: Sequence[str], widths: Sequence[int], kind: str) -> str:
    padded = [
        cell.rjust(width) if at in RIGHT else cell.ljust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return _text("  ".join(padded), kind)


def _text(text: str, kind: str) -> str:
    return f'<tspan class="{kind}" xml:space="preserve">{escape(text)}</tspan>'


def badges(figures: dict[str, Any]) -> dict[str, str]:
    """The badges by file name."""
    tests, covered, kit = figures["tests"], figures.get("coverage"), figures["kit"]
    failed = f", {tests['failed']} failed" if tests["failed"] else ""
    broken = sum(card["broken"] for card in kit)
    claims = sum(card["held"] for card in kit)
    drawn = {
        "tests.svg": badge("core's tests", f"{tests['passed']:,} passed{failed}", RED if failed else GREEN),
        "kit.svg": badge(
            f"kit: {', '.join(card['subject'] for card in kit)}",
            f"{claims} claims hold" + (f", {broken} broken" if broken else ""),
            RED if broken else GREEN,
        ),
    }
    if covered is not None:
        colour = GREEN if covered["percent"] >= 90 else AMBER if covered["percent"] >= 75 else RED
        drawn["coverage.svg"] = badge("coverage of core", f"{covered['percent']} %", colour)
    return drawn


def badge(label: str, message: str, colour: str) -> str:
    """Two words of colour, as everybody knows them; nothing is fetched for it."""
    letter, edge = 7.3, 6
    left, right = (round(len(text) * letter + 2 * edge) for text in (label, message))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{escape(label)}: {escape(message)}">\n'
        f'<rect width="{left + right}" height="20" rx="3" fill="{GREY}"/>'
        f'<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right - 3}z" fill="{colour}"/>\n'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="12">'
        f'<text x="{left / 2}" y="14" textLength="{left - 2 * edge}">{escape(label)}</text>'
        f'<text x="{left + right / 2}" y="14" textLength="{right - 2 * edge}">{escape(message)}</text></g></svg>\n'
    )


def badge_figures(results: Path, coverage: Path, cards: Sequence[Path]) -> dict[str, Any]:
    """Of pytest's JUnit file, of `coverage json`, and of the kit's score cards."""
    suites = list(ElementTree.parse(results).getroot().iter("testsuite"))
    total, skipped, failures, errors = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "skipped", "failures", "errors")
    )
    percent = int(json.loads(coverage.read_text())["totals"]["percent_covered"])  # rounded down
    kit = []
    for card in cards:
        verdicts = [claim["verdict"] for claim in json.loads(card.read_text())["claims"]]
        broken = verdicts.count("FAILED") + verdicts.count("known to fail")
        kit.append({"subject": card.stem.removeprefix("lmcache-"), "held": verdicts.count("held"), "broken": broken})
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "tests": {"passed": total - skipped - failures - errors, "failed": failures + errors, "skipped": skipped},
        "coverage": {"percent": percent},
        "kit": kit,
    }


def drawn() -> dict[str, str]:
    """Every picture by file name, of the figures that are kept."""
    figures = json.loads((HOME / "badges.json").read_text())
    shown = {
        "demo.svg": demo_picture(json.loads((HOME / "demo.json").read_text())),
        "gains.svg": gains_picture(json.loads((HOME / "gains.json").read_text())),
        "hits.svg": hits_picture(json.loads((HOME / "hits.json").read_text())),
    }
    return shown | badges(figures)


def main(argv: Sequence[str]) -> None:
    match argv:
        case ["demo"]:
            demo = ["lmcache-core", "demo", "--json", "--document", "docs/glossary.md"]
            found = subprocess.run(demo, stdout=subprocess.PIPE, check=True).stdout
            machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[2])}  # of the last 15 minutes
            figures = json.loads(found) | machine | {"date": f"{datetime.now(UTC):%Y-%m-%d}"}
            (HOME / "demo.json").write_text(json.dumps(figures, indent=1) + "\n")
        case ["badges", results, coverage, *cards]:
            figures = badge_figures(Path(results), Path(coverage), [Path(card) for card in cards])
            (HOME / "badges.json").write_text(json.dumps(figures, indent=1) + "\n")
        case []:
            pass
        case _:
            raise SystemExit(__doc__)
    for name, picture in drawn().items():
        (HOME / name).write_text(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
