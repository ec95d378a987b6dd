"""Every limit with its reason."""

from __future__ import annotations

BATCH_HASHES = 4096  # of one event, and of one batch
BATCH_TOKENS = 65_536  # of one event, and of one batch: 16 for each hash
BATCH_OVERHEAD_BYTES = 165  # of a batch that waits or is kept: the objects around its bytes
PENDING_MAX = 65_536  # objects whose blocks were reported but that are stored nowhere now …
PENDING_BYTES_MAX = 128 << 20  # … and their memory: 2 KiB each, 16 hashes and a few tokens
KNOWN_BYTES_MAX = 2 << 30  # of engines' reports: a million of 16 blocks of 32 bytes, and room
KEPT_BYTES_MAX = 64 << 20  # batches for replays: 10,000 of the usual 4 KiB, and room
ASKED_KEYS = 256  # about which the tiers are asked at once: about 1 ms of the server's loop
SNAPSHOTS_MAX = 2  # at once, 80 bytes for each object; further routers are answered from the latest of them
CONNECTIONS_MAX = 128  # of routers at one of the two sockets: a cluster has a few
REQUEST_BYTES_MAX = 1024  # of what a router sends: a number, or a topic of 256 letters
UNREAD_BYTES_MAX = (8 << 20, 32 << 20, 64 << 20)  # of a router, of those of an address, and of all
TEND_S = 1.0  # between two looks at routers that hang in a handshake or an answer
EVENTS_A_TURN = 8  # of routers …
PAUSE_S = 0.001  # … and then the server's other threads get the interpreter: routers may take half of it
CLOSE_S = 1.0  # how long a publisher that closes waits for routers to read the rest
