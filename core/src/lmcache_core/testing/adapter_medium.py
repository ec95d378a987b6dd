"""The medium behind the adapter: durability, other handles, damage. Looked at through a second door."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.testing import material
from lmcache_core.testing.contract import Contract, missing
from lmcache_core.tiers.contract import L2Adapter, Result
from lmcache_core.tiers.format import object_kind
from lmcache_core.tiers.transfer import Carrier, Loaded, Transfer

LAYOUT = Layout("uint8", (20_000,))
NAMESPACE = 0x1234


class MediumTests(Contract):
    """Needs `reopen`, `backdoor` or `expire`; which of them is a duty follows from the capabilities."""

    # --- other handles --------------------------------------------------------------------------------------
    @contextmanager
    def _opened(self, adapter: L2Adapter, reopen: Any) -> Iterator[L2Adapter]:
        if reopen is None:
            claims = [name for name in ("durable", "shared") if getattr(adapter.capabilities, name)]
            if claims:
                missing(type(self), "reopen", f"the adapter claims {' and '.join(claims)}")
            pytest.skip("the adapter claims neither durable nor shared, and there is no fixture 'reopen'")
        with reopen() as fresh:
            assert fresh is not adapter
            yield fresh

    def test_a_fresh_handle_sees_what_the_old_one_saw(self, adapter: L2Adapter, reopen: Any) -> None:
        for number in range(5):
            material.store(adapter, material.key(number), material.content(number, 5000))
        if adapter.capabilities.delete:
            adapter.delete([material.key(3)], material.soon())
        keys = [material.key(number) for number in range(7)]
        expected = [bool(found) for found in adapter.exists(keys, material.soon())]
        listed = sorted(entry[:2] for entry in material.scan(adapter)) if adapter.capabilities.scan else None
        adapter.close()
        with self._opened(adapter, reopen) as fresh:
            assert [bool(found) for found in fresh.exists(keys, material.soon())] == expected
            for number, there in enumerate(expected):
                if there:
                    assert material.holds(fresh, material.key(number), material.content(number, 5000))
                else:
                    assert material.load(fresh, material.key(number), 5000)[0].result is Result.MISS
            if listed is not None:
                assert sorted(entry[:2] for entry in material.scan(fresh)) == listed

    def test_the_medium_has_one_name_for_every_adapter_on_it(self, adapter: L2Adapter, reopen: Any) -> None:
        name = adapter.medium()
        assert name is None or (isinstance(name, str) and name)
        with self._opened(adapter, reopen) as fresh:
            assert fresh.medium() == name
            if fresh.capabilities.shared:
                assert name is not None, "an adapter that claims shared says where it stores: see L2Adapter.medium"

    def test_two_handles_agree_while_both_are_open(self, adapter: L2Adapter, reopen: Any) -> None:
        if not adapter.capabilities.shared:
            pytest.skip("the adapter does not claim shared")
        with self._opened(adapter, reopen) as other:
            material.store(adapter, material.key(1), b"by the one")
            assert material.holds(other, material.key(1), b"by the one")
            material.store(other, material.key(1), b"by the other")
            assert material.holds(adapter, material.key(1), b"by the other")
            assert material.load(adapter, material.key(2), 10)[0].result is Result.MISS
            material.store(other, material.key(2), b"new")
            assert list(adapter.exists([material.key(2)], material.soon())) == [True]
            assert material.holds(adapter, material.key(2), b"new")
            if adapter.capabilities.delete:
                adapter.delete([material.key(1)], material.soon())
                assert list(other.exists([material.key(1)], material.soon())) == [False]
                assert other.delete([material.key(1)], material.soon())[0].result is Result.DONE

    def test_someone_leads_and_another_once_that_one_is_gone(self, adapter: L2Adapter, reopen: Any) -> None:
        if not adapter.capabilities.shared:
            assert adapter.try_to_lead() is True, "there is nobody else to lead"
            return
        with self._opened(adapter, reopen) as other:
            assert adapter.try_to_lead() is True, "the first to ask"
            assert isinstance(other.try_to_lead(), bool)
            assert adapter.try_to_lead() is True, "who leads goes on leading"
            adapter.close()
            assert other.try_to_lead() is True, "nobody leads, although one asks"

    def test_what_expired_is_a_miss(self, adapter: L2Adapter, expire: Any) -> None:
        if expire is None:
            if adapter.capabilities.ttl:
                missing(type(self), "expire", "the adapter claims ttl")
            pytest.skip("the adapter does not claim ttl")
        material.store(adapter, material.key(1), b"short-lived")
        assert material.holds(adapter, material.key(1), b"short-lived")
        expire()
        assert list(adapter.exists([material.key(1)], material.soon())) == [False]
        assert material.load(adapter, material.key(1), 100)[0].result is Result.MISS
        material.store(adapter, material.key(1), b"again")
        assert material.holds(adapter, material.key(1), b"again")

    # --- the medium itself ----------------------------------------------------------------------------------
    def _door(self, adapter: L2Adapter, backdoor: Any) -> Any:
        if backdoor is None:
            if adapter.capabilities.durable:
                missing(type(self), "backdoor", "the adapter claims durable: torn objects will happen")
            pytest.skip("no fixture 'backdoor'")
        return backdoor

    def test_the_medium_holds_what_was_stored_and_nothing_after_a_delete(
        self, adapter: L2Adapter, backdoor: Any
    ) -> None:
        door = self._door(adapter, backdoor)
        payload = material.content(1, 5000)
        assert door.read(material.key(1)) is None
        material.store(adapter, material.key(1), payload)
        found = door.read(material.key(1))
        assert found is not None, "stored, and not on the medium"
        assert payload in found, "the medium does not hold the bytes as they are: codecs are the kernel's"
        if adapter.capabilities.delete:
            adapter.delete([material.key(1)], material.soon())
            assert door.read(material.key(1)) is None, "deleted, and still on the medium"

    def test_what_someone_else_removed_is_a_miss(self, adapter: L2Adapter, backdoor: Any) -> None:
        door = self._door(adapter, backdoor)
        material.store(adapter, material.key(1), b"object")
        assert list(adapter.exists([material.key(1)], material.soon())) == [True]
        door.remove(material.key(1))
        assert list(adapter.exists([material.key(1)], material.soon())) == [False]
        assert material.load(adapter, material.key(1), 100)[0].result is Result.MISS
        assert adapter.delete([material.key(1)], material.soon())[0].result is Result.DONE

    @pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.99])
    def test_a_torn_object_is_never_called_whole(self, adapter: L2Adapter, backdoor: Any, keep: float) -> None:
        door = self._door(adapter, backdoor)
        whole = material.content(1, 20_000)
        material.store(adapter, material.key(1), whole)
        on_medium = door.read(material.key(1))
        door.write(material.key(1), on_medium[: int(len(on_medium) * keep)])
        outcome, found = material.load(adapter, material.key(1), 4096, 20_000 - 4096)
        if outcome.result is Result.DONE:  # a medium that keeps no length: then the length must be the truth
            assert outcome.nbytes < len(whole), "bytes that are not there were said to be loaded"
            assert found[: outcome.nbytes] == whole[: outcome.nbytes]
        else:
            assert outcome.result in (Result.DAMAGED, Result.MISS), outcome

    @pytest.mark.parametrize("damage", ["cut", "emptied", "longer", "flipped", "neighbour", "zeros"])
    def test_a_damaged_object_is_a_miss(self, adapter: L2Adapter, backdoor: Any, damage: str) -> None:
        """With the kernel's own format around it, and on the way that the server takes."""
        door = self._door(adapter, backdoor)
        carrier = Carrier(adapter, CodecChain(), threading.Event())
        transfers = [_transfer(number) for number in range(2)]
        stored = carrier.store(transfers, material.soon())
        assert material.results(stored) == [Result.DONE, Result.DONE]
        assert [loaded.reason for loaded, _ in (_loaded(carrier, n) for n in range(2))] == [None, None]
        victim, other = (transfer.tier_key for transfer in transfers)
        content = bytearray(door.read(victim))
        if damage == "flipped":
            content[len(content) // 2] ^= 4
        elif damage == "neighbour":
            content = bytearray(door.read(other))
        elif damage == "zeros":
            content = bytearray(len(content))
        else:
            content = {"cut": content[:-1000], "emptied": bytearray(), "longer": content + bytes(500)}[damage]
        door.write(victim, bytes(content))
        loaded, _ = _loaded(carrier, 0)
        assert loaded.reason is not None, "damaged bytes were served"
        whole, found = _loaded(carrier, 1)
        assert whole.reason is None, whole
        assert found == material.content(1, LAYOUT.nbytes)


def _transfer(number: int, into: bytearray | None = None) -> Transfer:
    view = memoryview(into if into is not None else bytearray(material.content(number, LAYOUT.nbytes)))
    name = material.key(number, "object ")[:32]
    return Transfer(name, NAMESPACE, 1, object_kind(LAYOUT, CodecChain()), view)


def _loaded(carrier: Carrier, number: int) -> tuple[Loaded, bytes]:
    into = bytearray(LAYOUT.nbytes)
    (loaded,) = carrier.load([_transfer(number, into)], material.soon())
    return loaded, bytes(into)
