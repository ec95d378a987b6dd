"""What an action does to the server: through its own client, as any other session, and through the view of its pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from lmcache_core import Client, Status
from lmcache_core.errors import UsageError
from lmcache_core.limits import EXPLAIN_KEYS_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.server.operation import ObjectInfo, OperationContext, PoolView
from lmcache_core.tokens.keys import chunk_keys, keys_from_block_hashes
from lmcache_hints.envelope import RefusedError, Target
from lmcache_hints.holdings import Objects
from lmcache_hints.limits import CALL_S, KEYS_MAX


class _Root(NamedTuple):
    """A namespace of which only the digest is known: enough to derive keys."""

    digest: bytes


class Node:
    """Thread-safe. Its calls raise what the client's raise."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context
        self._client = self._connect()

    def _connect(self) -> Client:
        settings = self._context.settings
        return Client.connect(
            settings.name,
            runtime_dir=settings.runtime_dir,
            client_name="lmcache-hints",
            maps_pool=False,
            call_timeout_s=CALL_S,
        )

    def pool_bytes(self) -> int:
        """Bytes of the server's pool."""
        return self._context.on_loop(lambda view: view.nbytes)

    def objects_of(self, target: Target) -> Objects:
        """What an action means. Raises `RefusedError`."""
        namespace = self._namespace_of(target)
        known, tenant = self._context.on_loop(lambda view: (view.layout(namespace), view.tenant(namespace)))
        layout = known
        if target.layout is not None:
            try:
                layout = Layout(target.layout.dtype, tuple(target.layout.shape), target.layout.memory_format)
            except UsageError as error:
                raise RefusedError(str(error)) from error
        if layout is None:
            raise RefusedError(
                f"nobody uses the namespace {namespace:016x}, and the pool has nothing of it: send its layout"
            )
        if known is not None and layout != known:
            raise RefusedError(f"the namespace {namespace:016x} has the layout {known}, not {layout}")
        return Objects(namespace, layout, _keys_of(target), tenant, known is not None)

    def _namespace_of(self, target: Target) -> int:
        if target.namespace_digest:
            return int.from_bytes(bytes.fromhex(target.namespace_digest)[:8], "little")
        if not target.namespace:
            raise RefusedError("it names no namespace: send its label, its id in 16 hexadecimal digits, or its digest")
        found = self._context.on_loop(lambda view: view.namespaces_of(target.namespace))
        if len(found) > 1:
            ids = ", ".join(f"{each:016x}" for each in found[:8])
            raise RefusedError(f"{len(found)} namespaces have the label {target.namespace!r}: send one of {ids}")
        if found:
            return found[0]
        try:
            if len(target.namespace) == 16:
                return int(target.namespace, 16)
        except ValueError:
            pass  # then it was meant as a label
        raise RefusedError(f"no namespace here has the label {target.namespace!r}: `lmcache-core status` lists them")

    def there(self, namespace: int, keys: Sequence[bytes]) -> list[ObjectInfo | None]:
        """For each key the object in memory. Does not count as a use."""
        found: list[ObjectInfo | None] = []
        for page in _pages(keys):
            found += self._context.on_loop(partial(_described, namespace, page))
        return found

    def used(self, namespace: int, keys: Sequence[bytes], _term_s: float) -> list[bytes]:
        """These count as used now; at most a page of them. Returns those that are there."""
        return self._context.on_loop(lambda view: view.used(namespace, keys))

    def load(self, objects: Objects, keys: Sequence[bytes], tiers: Sequence[str] | None, wait_s: float) -> None:
        """Load these from the tiers and keep them; at most a page of them. A namespace that nobody uses is registered
        only for this: if its layout is wrong, an engine must be able to come with the right one."""
        if objects.known:
            self._client.warm(objects.namespace, objects.layout, keys, tiers, wait_s)
            return
        with self._connect() as client:
            client.warm(objects.namespace, objects.layout, keys, tiers, wait_s)

    def pin(self, namespace: int, layout: Layout, keys: Sequence[bytes], term_s: float) -> list[bytes]:
        """Returns those that are pinned now."""
        granted: list[bytes] = []
        for page in _pages(keys):
            statuses = self._client.pin_by_id(namespace, layout, page, ttl_s=term_s)
            granted += [key for key, status in zip(page, statuses, strict=True) if status is Status.GRANTED]
        return granted

    def pin_again(self, namespace: int, keys: Sequence[bytes], term_s: float) -> list[bytes]:
        """The same for a page of what was pinned before."""
        layout = self._context.on_loop(lambda view: view.layout(namespace))
        return [] if layout is None else self.pin(namespace, layout, keys, term_s)

    def drop(self, objects: Objects, incarnations: Mapping[bytes, int]) -> None:
        """These incarnations leave the memory, and stay on the tiers."""
        for page in _pages(list(incarnations)):
            chosen = {key: incarnations[key] for key in page}
            self._client.drop_by_id(objects.namespace, objects.layout, chosen)

    def tiers_of(self, objects: Objects, keys: Sequence[bytes]) -> list[dict[str, bool]]:
        """For each key the tiers that have it (True), or to which it is on its way (False)."""
        found: list[dict[str, bool]] = []
        for page in _pages(keys):
            explained = self._client.explain_by_id(objects.namespace, objects.layout, page)
            found += [
                {word.tier: bool(word.found) for word in each.tiers if word.found or word.reason == "on_its_way"}
                for each in explained
            ]
        return found

    def tier_names(self) -> list[str]:
        """Of all tiers."""
        return [str(tier["name"]) for tier in self._client.tiers_list()]

    def close(self) -> None:
        """The server stops: nothing waits for it."""
        self._client.close(timeout_s=0.0)


def _keys_of(target: Target) -> tuple[bytes, ...]:
    given = [name for name in ("keys", "block_hashes", "token_ids") if getattr(target, name)]
    if len(given) != 1:
        raise RefusedError(
            f"it names its objects by {' and '.join(given) or 'nothing'}: send one of keys, block_hashes and token_ids"
        )
    if target.keys:
        return tuple(dict.fromkeys(map(bytes.fromhex, target.keys)))
    if not target.namespace_digest:
        raise RefusedError(f"{given[0]} need namespace_digest: keys are derived from it")
    if len(target.token_ids) // target.chunk_tokens > KEYS_MAX:
        raise RefusedError(f"{len(target.token_ids)} tokens are more than {KEYS_MAX} objects: send fewer")
    root = _Root(bytes.fromhex(target.namespace_digest))
    try:
        if target.token_ids:
            return tuple(chunk_keys(target.token_ids, root, target.chunk_tokens))
        hashes = [bytes.fromhex(each) for each in target.block_hashes]
        return tuple(keys_from_block_hashes(hashes, root, algorithm=target.hash_algorithm, seed=target.hash_seed))
    except UsageError as error:
        raise RefusedError(str(error)) from error


def _described(namespace: int, page: Sequence[bytes], view: PoolView) -> list[ObjectInfo | None]:
    return view.describe(namespace, page)


def _pages(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (keys[first : first + EXPLAIN_KEYS_MAX] for first in range(0, len(keys), EXPLAIN_KEYS_MAX))
