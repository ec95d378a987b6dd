"""The conformance kit, over a real master and a real node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from services.mooncake_cluster import NODE_BYTES_MIN, MooncakeCluster, MooncakeDoor

from lmcache_core.tiers.contract import AdapterContext
from lmcache_mooncake.adapter import MooncakeAdapter
from lmcache_mooncake.settings import MooncakeSettings
from lmcache_testing import Backdoor, L2AdapterContract, StallingProxy

PREFIX = "lmcache/"
EMPTY = b"\0"


class StoreDoor(Backdoor):
    """Mooncake's own client, on names as the documentation has them. Mooncake has no empty objects: a byte stands for
    one."""

    def __init__(self, door: MooncakeDoor) -> None:
        self._door = door

    def read(self, key: bytes) -> bytes | None:
        first, second = names_of(key)
        found = self._door.ask("read", first)
        found = found if found is not None else self._door.ask("read", second)
        return b"" if found == EMPTY else found

    def write(self, key: bytes, content: bytes) -> None:
        self._door.ask("write", self._used(key), content or EMPTY)

    def remove(self, key: bytes) -> None:
        self._door.ask("remove", self._used(key))

    def _used(self, key: bytes) -> str:
        first, second = names_of(key)
        return second if self._door.ask("read", first) is None and self._door.ask("read", second) is not None else first


def names_of(key: bytes) -> tuple[str, str]:
    return f"{PREFIX}{key.hex()}.0", f"{PREFIX}{key.hex()}.1"


class TestMooncake(L2AdapterContract):
    component = "mooncake"

    @pytest.fixture
    def made(self, cluster: MooncakeCluster) -> Callable[..., MooncakeAdapter]:
        def make(**more: object) -> MooncakeAdapter:
            settings = {"master": cluster.address, "staging_bytes": 16 << 20, **more}
            return MooncakeAdapter(MooncakeSettings.model_validate(settings), AdapterContext(tier="shared"))

        return make

    @pytest.fixture
    def proxy(self, cluster: MooncakeCluster) -> Iterator[StallingProxy]:
        with StallingProxy("127.0.0.1", cluster.port) as proxy:
            yield proxy

    @pytest.fixture
    def adapter(
        self, request: pytest.FixtureRequest, made: Callable[..., MooncakeAdapter]
    ) -> Iterator[MooncakeAdapter]:
        behind = {"stall", "outage"} & set(request.fixturenames)  # tests without trouble need no proxy
        where = {"master": f"127.0.0.1:{request.getfixturevalue('proxy').port}"} if behind else {}
        with made(**where) as adapter:
            yield adapter

    @pytest.fixture
    def reopen(self, made: Callable[..., MooncakeAdapter]) -> Callable[..., MooncakeAdapter]:
        return made

    @pytest.fixture
    def backdoor(self, cluster: MooncakeCluster) -> StoreDoor:
        return StoreDoor(cluster.door())

    @pytest.fixture
    def litter(self, cluster: MooncakeCluster) -> Callable[[bytes], None]:
        def litter(key: bytes) -> None:
            for name in (f"{PREFIX}notes", f"{PREFIX}CAFE.0", "elsewhere", f"{PREFIX}{key.hex()}", names_of(key)[0]):
                cluster.door().ask("write", name, b"somebody's")

        return litter

    @pytest.fixture
    def wipe(self, cluster: MooncakeCluster) -> Callable[[], None]:
        return lambda: (cluster.door().ask("wipe"), None)[1]

    @pytest.fixture
    def leftovers(self, cluster: MooncakeCluster) -> Callable[[], list[str]]:
        """An object under both of its names, and names that are none of ours."""

        def left() -> list[str]:
            names = cluster.names()
            both = [name for name in names if name.endswith(".1") and f"{name[:-1]}0" in names]
            return both + [name for name in names if not name.startswith(PREFIX)]

        return left

    @pytest.fixture
    def hang(self, cluster: MooncakeCluster) -> AbstractContextManager[None]:
        return cluster.hang_master()

    @pytest.fixture
    def stall(self, proxy: StallingProxy) -> AbstractContextManager[None]:
        return proxy.stall()

    @pytest.fixture
    def outage(self, proxy: StallingProxy) -> AbstractContextManager[None]:
        return proxy.outage()

    @pytest.fixture
    def unreachable(self, made: Callable[..., MooncakeAdapter]) -> Iterator[MooncakeAdapter]:
        with made(master="127.0.0.1:1") as adapter:
            yield adapter

    @pytest.fixture
    def small_adapter(self, own_cluster: Callable[..., MooncakeCluster]) -> Iterator[MooncakeAdapter]:
        small = own_cluster(NODE_BYTES_MIN, 1, "--default_kv_lease_ttl=100")
        small.door().ask("fill", "others", (13 << 20).to_bytes(4, "little"))
        settings = MooncakeSettings(master=small.address, staging_bytes=4 << 20)
        with MooncakeAdapter(settings, AdapterContext(tier="small")) as adapter:
            yield adapter
