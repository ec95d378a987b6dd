from __future__ import annotations

import pytest

from lmcache_core.errors import SettingsError
from lmcache_core_vllm.config import ConnectorConfig


def test_nothing_need_be_said() -> None:
    assert ConnectorConfig.parse({}) == ConnectorConfig()


def test_a_misspelt_setting_is_told_with_its_name() -> None:
    with pytest.raises(SettingsError, match="no setting 'load_timeout': did you mean 'load_timeout_s'"):
        ConnectorConfig.parse({"load_timeout": 1})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"load": "later"}, "use 'async' or 'sync'"),
        ({"verify": "yes"}, "use 'never' or 'first' or 'always'"),
        ({"step_wait_s": 0}, "must be positive, got 0"),
        ({"saves_in_flight": -1}, "must be positive"),
        ({"store_cpu_share": 0}, "must be positive, got 0"),
        ({"retry_s": "1"}, "give a number"),
        ({"save_generated": 1}, "give true or false"),
        ({"model": 3}, "give a string"),
    ],
)
def test_a_wrong_value_is_told_with_what_to_give(given: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ConnectorConfig.parse(given)


def test_without_vllm_the_class_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import lmcache_core_vllm

    monkeypatch.delitem(sys.modules, "lmcache_core_vllm.connector", raising=False)
    for name in ["vllm", *(each for each in sys.modules if each.startswith("vllm."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"needs vLLM 0\.32 or later in the same environment"):
        _ = lmcache_core_vllm.LMCacheCoreConnector


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import lmcache_core_vllm

    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        _ = lmcache_core_vllm.Connector
