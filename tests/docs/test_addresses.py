"""One place has the project's addresses, and everything that needs one has it from there."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT)
    from tools.addresses import ALERTS, ALERTS_TEST, MENU, PAGES, RUNBOOKS, SOURCE, page_url, with_runbooks, written

AN_ADDRESS = ("https://forge.example/lmcache-core", "https://docs.example/stable")


def alerts_of(text: str) -> dict[str, str]:
    """The text of each rule, by its name."""
    return {rule.partition("\n")[0]: rule for rule in text.split("- alert: ")[1:]}


def test_the_files_are_what_the_tool_writes() -> None:
    stale = [path for path, text in written(SOURCE, PAGES).items() if path.read_text() != text]
    assert stale == [], "run python tools/addresses.py"


def test_every_package_leads_to_the_project_once_it_has_an_address() -> None:
    for path, text in written(*AN_ADDRESS).items():
        if path.name != "pyproject.toml":
            continue
        before, after = tomllib.loads(path.read_text()), tomllib.loads(text)
        urls = after["project"].pop("urls")
        assert set(urls) == {"Source", "Issues", "Documentation", "Changelog"}
        name = urls["Changelog"].removesuffix("/").rpartition("/")[2]
        assert f"project/changes/{name}.md" in MENU.read_text()
        before["project"].pop("urls", None)
        assert after == before


def test_every_alert_leads_to_a_heading_of_a_page() -> None:
    assert set(RUNBOOKS) == set(alerts_of(ALERTS.read_text()))
    for page in RUNBOOKS.values():
        path, _, heading = page.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / path).read_text(), re.MULTILINE)
        assert not heading or heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_each_alert_has_its_runbook_once_there_is_an_address_and_none_without() -> None:
    text = written(*AN_ADDRESS)[ALERTS]
    for name, rule in alerts_of(text).items():
        assert re.findall(r"runbook_url: (.*)", rule) == [page_url(AN_ADDRESS[1], RUNBOOKS[name])]
    assert "runbook_url" not in with_runbooks(text, text, "")
    assert page_url("https://docs.example", "a/b.md#c") == "https://docs.example/a/b/#c"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, as Debian's prometheus brings it")
def test_alerts_with_runbooks_still_pass_their_tests(tmp_path: Path) -> None:
    files = written(*AN_ADDRESS)
    for path in (ALERTS, ALERTS_TEST):
        (tmp_path / path.name).write_text(files[path])
    done = subprocess.run(
        ["promtool", "test", "rules", ALERTS_TEST.name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_site_knows_its_address_and_forgets_it() -> None:
    text = written(*AN_ADDRESS)[MENU]
    assert "site_url: https://docs.example/stable/\nrepo_url: https://forge.example/lmcache-core\n" in text
    assert "site_url" not in written("", "")[MENU]


@pytest.mark.parametrize("address", ["docs.example", "https://docs.example/", "https://docs.example/ x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="write an address as https://host/path, without a slash at its end"):
        written("", address)
