"""Writes the project's public addresses wherever they belong, from the two constants below.

    python tools/addresses.py

That is `[project.urls]` of every package, `site_url` and `repo_url` of the site, and `runbook_url` of every alert, with
which a notification leads to the page about it (the Helm chart takes the alerts from the same file). Without an address
there is none of them. Run it after changing a constant; a test compares the files.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SOURCE = ""  # where the repository is, without a slash at its end: https://forge.example/lmcache-core
PAGES = ""  # where the site of tools/site.py is: https://docs.example/lmcache-core/stable

ROOT = Path(__file__).resolve().parent.parent
ALERTS = ROOT / "contrib/dashboards/alerts.yaml"
ALERTS_TEST = ROOT / "contrib/dashboards/alerts_test.yaml"
MENU = ROOT / "mkdocs.yml"

# Where to read on when an alert fires: a page of docs/ and its heading.
RUNBOOKS = {
    "LMCacheDown": "operating/troubleshooting.md#the-server-does-not-start",
    "LMCacheTierBreakerOpen": "operating/troubleshooting.md#a-tier-is-down-its-circuit-breaker-is-open",
    "LMCacheTierHangs": "operating/tiers.md#what-happens-when-a-tier-is-in-trouble",
    "LMCacheTierNearlyFull": "operating/capacity.md#how-much-is-worth-holding",
    "LMCacheRestartedCold": "operating/restarts.md#when-it-starts-cold",
    "LMCacheEnginesDie": "operating/server.md#shutdown-and-crashes",
    "LMCacheObjectsLost": "operating/tiers.md#dirty-objects-drop-wait-or-keep",
    "LMCacheQuarantine": "operating/troubleshooting.md#full",
    "LMCacheFaults": "operating/troubleshooting.md#something-is-disabled",
    "LMCachePolicyFails": "operating/troubleshooting.md#full",
    "LMCacheScribbled": "operating/security.md",
    "LMCacheIndexFull": "operating/capacity.md#small-objects-in-the-l1",
    "LMCacheEventsDropped": "operating/troubleshooting.md#something-is-disabled",
    "LMCachePeerAway": "operating/many-nodes.md#what-happens-when-a-node-is-in-trouble",
    "LMCachePeerLies": "operating/many-nodes.md#what-happens-when-a-node-is-in-trouble",
    "LMCachePeerDirectoryAway": "operating/many-nodes.md#peers",
    "LMCacheHitRateFell": "operating/why-did-it-miss.md",
}


def main() -> int:
    for path, text in written(SOURCE, PAGES).items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


def written(source: str, pages: str) -> dict[Path, str]:
    """Every file that has an address, with its text for these two. Raises `ValueError` for one that ends in a slash or
    is none of the web."""
    for address in filter(None, (source, pages)):
        if not re.fullmatch(r"https?://[^\s/]+(/[^\s/]+)*", address):
            raise ValueError(f"{address!r}: write an address as https://host/path, without a slash at its end")
    alerts = ALERTS.read_text()
    found = {path: with_runbooks(path.read_text(), alerts, pages) for path in (ALERTS, ALERTS_TEST)}
    for path in sorted([ROOT / "core/pyproject.toml", *ROOT.glob("*/lmcache-*/pyproject.toml")]):
        name = "lmcache-core" if path.parent.name == "core" else path.parent.name
        found[path] = with_urls(path.read_text(), name, source, pages)
    found[MENU] = with_site(MENU.read_text(), source, pages)
    return found


def with_urls(project: str, name: str, source: str, pages: str) -> str:
    """A `pyproject.toml` with the table `[project.urls]` of these, or without it."""
    bare = re.sub(r"^\[project\.urls\]\n(?:[^\[\n].*\n)*\n", "", project, flags=re.MULTILINE)
    urls = {"Source": source, "Issues": source and f"{source}/issues"}
    urls |= {"Documentation": pages and f"{pages}/", "Changelog": pages and f"{pages}/project/changes/{name}/"}
    lines = [f'{label} = "{url}"\n' for label, url in urls.items() if url]
    if not lines:
        return bare
    table = "".join(["[project.urls]\n", *lines, "\n"])
    # Before what follows the table [project].
    return re.sub(r"(^\[project\]\n(?:(?!\[).*\n)*)", rf"\g<1>{table}", bare, count=1, flags=re.MULTILINE)


def with_site(menu: str, source: str, pages: str) -> str:
    """The site's settings with these, or without them."""
    bare = re.sub(r"^(?:site_url|repo_url): .*\n", "", menu, flags=re.MULTILINE)
    lines = [f"site_url: {pages}/\n"] if pages else []
    lines += [f"repo_url: {source}\n"] if source else []
    return re.sub(r"^(site_name: .*\n)", rf"\g<1>{''.join(lines)}", bare, count=1, flags=re.MULTILINE)


def with_runbooks(text: str, alerts: str, pages: str) -> str:
    """`text` with a `runbook_url` below the description of each alert, or without any. `alerts`: the rules."""
    bare = re.sub(r"^ +runbook_url: .*\n", "", text, flags=re.MULTILINE)
    if not pages:
        return bare
    pattern = r"- alert: (\w+)\n(?:(?! *- alert:).*\n)*? +(description: .*\n)"
    alert_of = {description: alert for alert, description in re.findall(pattern, alerts)}

    def below(found: re.Match[str]) -> str:
        url = page_url(pages, RUNBOOKS[alert_of[found[2]]])
        return f"{found[0]}{found[1]}runbook_url: {url}\n"

    return re.sub(r"^( +)(description: .*\n)", below, bare, flags=re.MULTILINE)


def page_url(pages: str, page: str) -> str:
    """The address of a page of docs/, which the site serves as a folder."""
    path, _, heading = page.partition("#")
    return f"{pages}/{path.removesuffix('.md')}/" + (f"#{heading}" if heading else "")


if __name__ == "__main__":
    sys.exit(main())
