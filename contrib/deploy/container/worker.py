"""What the two workers of compose.yaml do: what one has stored the other finds."""

from __future__ import annotations

import os

from lmcache_core import Client, Layout, Namespace
from lmcache_core.tokens.keys import chunk_keys

namespace = Namespace("demo", Layout("uint8", (2 * 2 * 256 * 2 * 64,)))
keys = chunk_keys(range(4096), namespace)
objects = [bytes(namespace.layout.nbytes) for _ in keys]
with Client.connect() as client:
    found = client.lookup(keys, namespace=namespace, wait_s=5).hits
    print(f"worker {os.uname().nodename}: {found} of {len(keys)} chunks were there", flush=True)
    stored = client.store(keys[found:], objects[found:], namespace=namespace)
    print(f"worker {os.uname().nodename}: {stored.stored} stored", flush=True)
