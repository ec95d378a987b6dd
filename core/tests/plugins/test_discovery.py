"""Plugins as they are found on a machine: distributions on the path, good and bad."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.errors import PluginError
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.discovery import ALLOW_LIST
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.records import Refusal
from lmcache_core.plugins.registry import Registry
from lmcache_core.plugins.requirement import allows, asks_for_us

Install = Callable[..., None]
Offering = Callable[..., str]


def refusal_of(registry: Registry, distribution: str) -> Refusal:
    return next(each for each in registry.refused if each.distribution == distribution)


def names(registry: Registry) -> list[str]:
    return [record.name for record in registry.plugins]


def test_an_installed_distribution_is_a_plugin_with_its_version(install: Install, offering: Offering) -> None:
    install("lmcache-acme", "acme", offering(("l2_adapter", "acme")), version="2.7")
    registry = load_plugins({})
    record = registry.owner(Kind.L2_ADAPTER, "acme")
    assert (record.name, record.distribution, record.version) == ("acme", "lmcache-acme", "2.7")


def test_plugins_stand_in_order_of_their_names_whatever_order_they_were_installed_in(
    install: Install, offering: Offering
) -> None:
    for entry in ("zeta", "alpha", "mid"):
        install(f"a-{entry}", entry, offering(("serde", f"{entry}_serde")))
    found = names(load_plugins({}))
    assert found[0] == "builtin"
    assert found[1:] == sorted(found[1:])
    assert {"alpha", "mid", "zeta"} <= set(found)


def test_a_broken_import_is_recorded_and_the_others_load(install: Install, offering: Offering) -> None:
    install("lmcache-broken", "broken", "import a_library_that_is_not_there", version="0.3")
    install("lmcache-sound", "sound", offering(("serde", "sound")))
    registry = load_plugins({})
    refused = refusal_of(registry, "lmcache-broken")
    assert (refused.name, refused.version) == ("broken", "0.3")
    assert "ModuleNotFoundError" in refused.why
    assert "a_library_that_is_not_there" in refused.why
    assert registry.offers(Kind.SERDE, "sound")


PANIC = "class PanicException(BaseException): ...\nraise PanicException('as one of Rust does')"


@pytest.mark.parametrize("fault", ["raise SystemExit(3)", "1 / 0", "def broken(:", PANIC, "raise GeneratorExit"])
def test_no_module_can_end_the_process_that_loads_it(install: Install, fault: str) -> None:
    install("lmcache-rude", "rude", fault)
    assert "it failed to load" in refusal_of(load_plugins({}), "lmcache-rude").why


def test_a_plugin_that_raises_while_it_says_what_it_offers_is_refused(install: Install) -> None:
    install(
        "lmcache-rude",
        "rude",
        """
        from lmcache_core import hookimpl

        @hookimpl
        def lmcache_components():
            raise RuntimeError("not today")
        """,
    )
    assert "RuntimeError: not today" in refusal_of(load_plugins({}), "lmcache-rude").why


def test_a_broken_plugin_is_fatal_only_when_it_is_named(install: Install) -> None:
    install("lmcache-broken", "broken", "import a_library_that_is_not_there", version="0.3")
    registry = load_plugins({})
    with pytest.raises(PluginError, match=r"broken \(lmcache-broken 0\.3\).*a_library_that_is_not_there"):
        registry.spec(Kind.L2_ADAPTER, "broken")


def test_two_distributions_that_claim_one_name_are_both_refused_with_the_cure(
    install: Install, offering: Offering
) -> None:
    install("acme-one", "acme", offering(("l2_adapter", "one")))
    install("acme-two", "acme", offering(("l2_adapter", "two")))
    registry = load_plugins({})
    assert "acme" not in names(registry)
    for distribution in ("acme-one", "acme-two"):
        why = refusal_of(registry, distribution).why
        assert "acme-one 1.0" in why
        assert "acme-two 1.0" in why
        assert ALLOW_LIST in why


def test_two_distributions_that_claim_one_component_are_both_refused_with_the_cure(
    install: Install, offering: Offering
) -> None:
    install("acme-one", "one", offering(("l2_adapter", "acme"), ("serde", "one_serde")))
    install("acme-two", "two", offering(("l2_adapter", "acme")))
    registry = load_plugins({})
    assert not registry.offers(Kind.L2_ADAPTER, "acme")
    assert not registry.offers(Kind.SERDE, "one_serde")
    with pytest.raises(PluginError, match=f"acme-one.*acme-two.*{ALLOW_LIST}"):
        registry.spec(Kind.L2_ADAPTER, "acme")


def test_one_name_in_two_families_is_no_conflict(install: Install, offering: Offering) -> None:
    install("acme-one", "one", offering(("l2_adapter", "acme")))
    install("acme-two", "two", offering(("serde", "acme")))
    registry = load_plugins({})
    assert registry.owner(Kind.L2_ADAPTER, "acme").name == "one"
    assert registry.owner(Kind.SERDE, "acme").name == "two"


def test_the_allow_list_settles_a_conflict(install: Install, offering: Offering) -> None:
    install("acme-one", "acme", offering(("l2_adapter", "acme")))
    install("acme-two", "acme", offering(("l2_adapter", "acme")))
    registry = load_plugins({ALLOW_LIST: "Acme_Two"})
    assert registry.owner(Kind.L2_ADAPTER, "acme").distribution == "acme-two"
    assert ALLOW_LIST in refusal_of(registry, "acme-one").why


def test_a_plugin_outside_the_allow_list_is_not_even_imported(install: Install, tmp_path: Path) -> None:
    trace = tmp_path / "imported"
    install("lmcache-shy", "shy", f"open({str(trace)!r}, 'w').close()")
    load_plugins({ALLOW_LIST: "lmcache-other"})
    assert not trace.exists()


def test_an_empty_allow_list_leaves_the_built_ins_alone(install: Install, offering: Offering) -> None:
    install("lmcache-acme", "acme", offering(("l2_adapter", "acme")))
    assert names(load_plugins({ALLOW_LIST: ""})) == ["builtin"]


def test_an_allow_list_name_that_is_not_installed_is_reported(install: Install) -> None:
    registry = load_plugins({ALLOW_LIST: "lmcache-absent"})
    assert "pip install lmcache-absent" in refusal_of(registry, "lmcache-absent").why


def test_a_built_in_component_cannot_be_replaced_by_an_installation(install: Install, offering: Offering) -> None:
    install("lmcache-acme", "acme", offering(("eviction_policy", "lru")))
    registry = load_plugins({})
    assert registry.owner(Kind.EVICTION_POLICY, "lru").name == "builtin"
    assert "reserved" in refusal_of(registry, "lmcache-acme").why


def test_the_name_of_the_built_in_plugin_is_reserved(install: Install, offering: Offering) -> None:
    install("lmcache-acme", "builtin", offering(("l2_adapter", "acme")))
    registry = load_plugins({})
    assert registry.owner(Kind.EVICTION_POLICY, "lru").distribution == "lmcache-core"
    assert "reserved" in refusal_of(registry, "lmcache-acme").why


@pytest.mark.parametrize(("api", "cure"), [(999, "upgrade lmcache-core"), (0, "upgrade the plugin")])
def test_another_api_generation_is_refused_before_anything_else_of_the_plugin_runs(
    install: Install, tmp_path: Path, api: int, cure: str
) -> None:
    trace = tmp_path / "called"
    install(
        "lmcache-ahead",
        "ahead",
        f"""
        from lmcache_core import PluginInfo, hookimpl

        @hookimpl
        def lmcache_plugin_info():
            return PluginInfo(api={api})

        @hookimpl
        def lmcache_components():
            open({str(trace)!r}, "w").close()
            return []
        """,
    )
    why = refusal_of(load_plugins({}), "lmcache-ahead").why
    assert f"API generation {api}" in why
    assert cure in why
    assert not trace.exists()


def test_a_plugin_of_a_later_generation_is_told_by_that_and_not_by_a_hook_that_we_do_not_know(install: Install) -> None:
    install(
        "lmcache-ahead",
        "ahead",
        """
        from lmcache_core import PluginInfo, hookimpl

        @hookimpl
        def lmcache_plugin_info():
            return PluginInfo(api=2)

        @hookimpl
        def lmcache_hook_of_generation_two():
            return []
        """,
    )
    why = refusal_of(load_plugins({}), "lmcache-ahead").why
    assert why == "it was written for API generation 2 and this lmcache-core serves 1: upgrade lmcache-core"


@pytest.mark.parametrize("needs", ["lmcache-core>=0.1,<0.3", ""])
def test_a_plugin_that_imports_a_name_of_another_version_is_told_by_its_bounds(
    install: Install, tmp_path: Path, needs: str
) -> None:
    install("lmcache-ahead", "ahead", "from lmcache_core import ANameThatComesLater")
    if needs:
        metadata = tmp_path / "lmcache_ahead-1.0.dist-info/METADATA"
        metadata.write_text(f"{metadata.read_text()}Requires-Dist: {needs}\n")
    why = refusal_of(load_plugins({}), "lmcache-ahead").why
    assert "cannot import name 'ANameThatComesLater'" in why
    assert (f"it asks for {needs}" if needs else "does not say which lmcache-core it needs") in why
    assert "and this is 0.1.0" in why


def test_a_typo_in_a_hook_name_is_refused_with_a_suggestion(install: Install) -> None:
    install(
        "lmcache-typo",
        "typo",
        """
        from lmcache_core import hookimpl

        @hookimpl
        def lmcache_componets():
            return []
        """,
    )
    why = refusal_of(load_plugins({}), "lmcache-typo").why
    assert "lmcache_componets" in why
    assert "did you mean 'lmcache_components'?" in why


def test_a_hook_without_its_mark_is_refused_rather_than_never_called(install: Install) -> None:
    install("lmcache-bare", "bare", "def lmcache_components():\n    return []\n")
    assert "@hookimpl" in refusal_of(load_plugins({}), "lmcache-bare").why


def test_an_argument_with_a_default_is_refused_because_pluggy_would_pass_nothing(install: Install) -> None:
    install(
        "lmcache-default",
        "default",
        """
        from lmcache_core import hookimpl

        @hookimpl
        def lmcache_check(settings=None):
            return []
        """,
    )
    assert "default" in refusal_of(load_plugins({}), "lmcache-default").why


def test_an_argument_that_the_hook_does_not_have_is_refused(install: Install) -> None:
    install(
        "lmcache-more",
        "more",
        """
        from lmcache_core import hookimpl

        @hookimpl
        def lmcache_check(settings, verbose):
            return []
        """,
    )
    assert "'verbose'" in refusal_of(load_plugins({}), "lmcache-more").why


def test_a_plugin_cannot_wrap_the_hooks_of_others(install: Install) -> None:
    install(
        "lmcache-wrap",
        "wrap",
        """
        from lmcache_core import hookimpl

        @hookimpl(wrapper=True)
        def lmcache_components():
            return (yield)
        """,
    )
    assert "wrap" in refusal_of(load_plugins({}), "lmcache-wrap").why


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("'nothing'", "sequence of ComponentSpec"),
        ("[ComponentSpec(Kind.SERDE, 'Upper', 'a:b')]", "'Upper'"),
        ("[ComponentSpec(Kind.SERDE, 'good', 'no_colon')]", "'no_colon'"),
        ("[ComponentSpec('serde?', 'good', 'a:b')]", "lmcache_core.Kind"),
        ("[ComponentSpec(Kind.SERDE, 'twin', 'a:b')] * 2", "twice"),
    ],
)
def test_a_senseless_offer_is_refused(install: Install, returned: str, said: str) -> None:
    install(
        "lmcache-odd",
        "odd",
        f"""
        from lmcache_core import ComponentSpec, Kind, hookimpl

        @hookimpl
        def lmcache_components():
            return {returned}
        """,
    )
    assert said in refusal_of(load_plugins({}), "lmcache-odd").why


def test_a_slow_import_is_seen_in_the_record(install: Install, offering: Offering) -> None:
    install("lmcache-slow", "slow", "import time\ntime.sleep(0.05)\n" + offering(("serde", "slow")))
    registry = load_plugins({})
    assert registry.owner(Kind.SERDE, "slow").load_s >= 0.05


def test_a_second_copy_further_down_the_path_is_no_second_claimant(
    install: Install, offering: Offering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("lmcache-acme", "acme", offering(("l2_adapter", "acme")), version="2.0")
    older = tmp_path / "older" / "lmcache_acme-1.0.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache-acme\nVersion: 1.0\n")
    (older / "entry_points.txt").write_text("[lmcache_core]\nold_acme = gone_module\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(older.parent)])
    registry = load_plugins({})
    assert registry.owner(Kind.L2_ADAPTER, "acme").version == "2.0"
    assert not any(each.name == "old_acme" for each in registry.refused)


def test_a_distribution_without_metadata_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torso = tmp_path / "torso-1.0.dist-info"
    torso.mkdir()
    (torso / "entry_points.txt").write_text("[lmcache_core]\ntorso = torso_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "builtin" in names(load_plugins({}))


def test_importing_the_package_and_loading_plugins_stays_light() -> None:
    """With everything that is installed beside it, seen from a fresh interpreter."""
    program = (
        "import sys, lmcache_core\n"
        "from lmcache_core.plugins.loader import load_plugins\n"
        "load_plugins()\n"
        "heavy = {'torch', 'pydantic', 'zmq', 'numpy', 'boto3', 'redis', 'transformers', 'rich'}\n"
        "print(','.join(sorted(heavy & set(sys.modules))))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading.Event().wait(60)",
        "while True:\n    try:\n        pass\n    except Exception:\n        pass",
        "import os\nos._exit(3)",
    ],
    ids=["waits", "computes", "leaves"],
)
def test_an_import_that_never_ends_or_ends_the_process_is_refused_by_name(
    install: Install, offering: Offering, source: str, tmp_path: Path
) -> None:
    """In a process of its own: the limit of a test uses the same timer."""
    install("lmcache-hangs", "hangs", source)
    install("lmcache-sound", "sound", offering(("serde", "sound")))
    program = (
        "from functools import partial; from lmcache_core.plugins import loader; from lmcache_core import Kind\n"
        "loader.patience = partial(loader.patience, limit_s=0.5)\n"
        "registry = loader.load_plugins()\n"
        "print(registry.offers(Kind.SERDE, 'sound'), *(each.why for each in registry.refused))"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), ALLOW_LIST: "lmcache-hangs,lmcache-sound"}
    told = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=20)
    assert told.stdout.startswith("True "), told.stderr
    expected = "its import called os._exit(3)" if "_exit" in source else "its import took more than 0.5 s, the limit"
    assert expected in told.stdout


@pytest.mark.parametrize("leaves", ["raise SystemExit(3)", "import sys\nsys.exit()"])
def test_a_plugin_that_would_end_the_process_is_refused_by_name(install: Install, leaves: str) -> None:
    install("lmcache-leaves", "leaves", leaves)
    assert refusal_of(load_plugins({}), "lmcache-leaves").why


def test_the_text_of_a_broken_import_is_one_line_without_passwords(install: Install) -> None:
    text = "no way to redis://bob:hunter2@host/0, password=hunter2, token: 'hunter2'\\n\\x1b[31m" + "x" * 2000
    install("lmcache-broken", "broken", f'raise RuntimeError("{text}")')
    why = refusal_of(load_plugins({}), "lmcache-broken").why
    assert "no way to redis://***@host/0" in why
    assert "hunter2" not in why
    assert why.isprintable()
    assert len(why) < 500


def test_a_leftover_of_another_version_is_no_second_plugin(
    install: Install, offering: Offering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("lmcache-acme", "acme", offering(("l2_adapter", "acme")), version="2.0")
    elsewhere = tmp_path / "elsewhere"
    for folder in (tmp_path, elsewhere):
        info = folder / "lmcache_acme-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: LMCache.Acme\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[lmcache_core]\nacme = lmcache_acme_module\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    assert load_plugins({}).owner(Kind.L2_ADAPTER, "acme").version == "2.0"


@pytest.mark.parametrize("wanted", ["lmcache-core>=9", "LMCache_Core[torch] (<0.1,>=0.0.1)", "lmcache-core~=9.1"])
def test_a_plugin_for_another_version_of_core_is_refused_unread(install: Install, tmp_path: Path, wanted: str) -> None:
    install("lmcache-later", "later", "raise AssertionError('it was imported')")
    (tmp_path / "lmcache_later-1.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: lmcache-later\nVersion: 1.0\nRequires-Dist: {wanted}\n"
    )
    assert f"it asks for {wanted}, and this is " in refusal_of(load_plugins({}), "lmcache-later").why


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        (">=0.1,<0.2", True), ("", True), ("==0.1.*", True), ("==0.1", True), ("~=0.1", True), ("!=0.1.0", False),
        ("==0.2.*", False), (">0.1.0", False), (" (<=0.1)", True), ("~=0.1.1", False), ("===weird", True),
    ],
)  # fmt: skip
def test_versions_are_compared_as_releases(wanted: str, allowed: bool) -> None:
    assert allows(f"lmcache-core{wanted}", "0.1.0") is allowed


def test_requirements_of_others_and_of_extras_are_not_ours() -> None:
    assert not any(map(asks_for_us, ["lmcache-core-extra>=9", "lmcache-corex", 'lmcache-core>=9; extra == "x"']))
