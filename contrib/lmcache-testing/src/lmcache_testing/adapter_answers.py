"""Answers: they have the types that the contract names, so that code that reads them later does not fail."""

from __future__ import annotations

from lmcache_core.tiers.contract import L2Adapter, Usage
from lmcache_testing import material
from lmcache_testing.contract import Contract


class AnswerTests(Contract):
    """Answers are written to status pages, compared, added up, and sent on: nearly right types fail there."""

    def test_answers_have_the_types_that_the_contract_names(self, adapter: L2Adapter) -> None:
        keys = [material.key(number) for number in range(3)]
        material.expect_stored(adapter, keys[0], b"object")
        material.expect_stored(adapter, keys[1], b"object")
        for sizes in ((6,), (5,)):  # DONE, and DAMAGED
            outcome, _ = material.load(adapter, keys[0], *sizes)
            material.expect_types(outcome, f"asked to load 6 bytes into {sizes[0]}")
        material.expect_miss(adapter, keys[2], "stored by nobody")
        found = adapter.exists(keys[1:], material.soon())
        odd = [one for one in found if not isinstance(one, bool)]
        message = f"exists answered {odd[0]!r} ({type(odd[0]).__name__})" if odd else ""
        assert not odd, f"{message}, and has to say True or False"
        if adapter.capabilities.scan:
            material.scan(adapter)
        if adapter.capabilities.delete:
            for name, call in (("delete", adapter.delete), ("set_aside", adapter.set_aside)):
                for outcome in call(keys[1:], material.soon()):
                    material.expect_types(outcome, f"{name} of a key that is there, and one that is not")
        medium = adapter.medium()
        named = medium is None or (isinstance(medium, str) and medium != "")
        assert named, f"medium() said {medium!r}, and has to give a name, or None"

    def test_usage_is_told_in_whole_numbers(self, adapter: L2Adapter) -> None:
        material.expect_stored(adapter, material.key(1), b"object")
        usage = adapter.usage()
        assert isinstance(usage, Usage), f"usage gave a {type(usage).__name__}, and has to give a Usage"
        for name, figure in usage._asdict().items():
            whole = figure is None or type(figure) is int
            message = f"usage says {name} = {figure!r} ({type(figure).__name__})"
            assert whole, f"{message}, and it has to be a whole number, or None"
