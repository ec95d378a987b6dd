"""What one installation does when it is asked to: run by its interpreter, in which the other side is not installed.

Only the names that every version exports are used. Answers are one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lmcache_core import Client, Layout, Namespace

NBYTES = 8192
COUNT = 32


def keys(first: int) -> list[bytes]:
    """Keys that both sides make alike."""
    return [number.to_bytes(4, "big") * 8 for number in range(first, first + COUNT)]


def content(key: bytes) -> bytes:
    """What stands under a key."""
    return key * (NBYTES // len(key))


def main(name: str, runtime_dir: str, what: str, first: int) -> None:
    namespace = Namespace("both sides know it", Layout("uint8", (NBYTES,)), format="opaque")
    wanted = keys(first)
    with Client.connect(name, runtime_dir=Path(runtime_dir)) as client:
        answer: dict[str, object] = {}
        if what == "store":
            stored = client.store(wanted, [content(key) for key in wanted], namespace=namespace)
            answer["stored"] = stored.stored
        else:
            into = [bytearray(NBYTES) for _ in wanted]
            answer["found"] = client.lookup(wanted, namespace=namespace, wait_s=10).hits
            answer["read"] = client.retrieve(wanted, into, namespace=namespace, verify="always").hits
            answer["right"] = sum(bytes(got) == content(key) for key, got in zip(wanted, into, strict=True))
            held = client.lookup(wanted, namespace=namespace, hold=True)
            answer["held"] = bool(held.promise)
            client.free_lookup_locks(held.promise)
        answer["why_unreachable"] = client.why_unreachable
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
