"""Mooncake's client for tests: `python mooncake_door.py MASTER`, one request of JSON a line.

In a process of its own: the library brings signal handlers and threads along, and crashes at the interpreter's end.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[1]) == 0
    for line in sys.stdin:
        verb, name, content = json.loads(line)
        answer: bytes | None = b""
        if verb == "read":
            answer = store.get(name) if store.is_exist(name) == 1 else None
        elif verb == "write":
            store.remove(name, True)
            assert store.put(name, bytes.fromhex(content)) == 0
        elif verb == "fill":  # with as many bytes as it is told, which the master never evicts
            pinned = ReplicateConfig()
            pinned.with_hard_pin = True
            assert store.put(name, bytes(int.from_bytes(bytes.fromhex(content), "little")), pinned) == 0
        elif verb == "remove":
            assert store.remove(name, True) == 0
        elif verb == "wipe":
            assert store.remove_all(True) >= 0
        out.write(json.dumps(None if answer is None else answer.hex()) + "\n")
        out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
