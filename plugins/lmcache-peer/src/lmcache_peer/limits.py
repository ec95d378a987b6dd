"""Every limit of this package, with its reason."""

from __future__ import annotations

from lmcache_core.tiers.object.format import TIER_KEY_BYTES

NAMES_MAX = 64  # in one request: a tier's largest batch
NAMES_BYTES_MAX = NAMES_MAX * TIER_KEY_BYTES
FRAME_BYTES_MAX = 16 << 10  # the largest request, with room; objects and digests follow their frame outside of it
TEXT_CHARS_MAX = 200
NONCE_BYTES = 32
NODES_MAX = 1024  # that a directory may name; beyond it is not ours, or wrong

ENTRY_BYTES_MAX = 4096  # of an entry in an answer of etcd, with its key, in base64

HANDSHAKE_S = 2.0  # for all of admission: whoever has nothing to prove does not keep a thread longer
REQUEST_S = 2.0  # from a request's first byte to its last
BYTES_PER_S_MIN = 4 << 20  # of a transfer, besides what its first byte may take: a trickle is no progress
PIECE_BYTES = 512 << 10  # received at once: what a core's own cache holds while its checksum is computed
STALL_S = 2.0  # a reader that takes nothing for so long has lost its connection, and with it its pins
IDLE_S = 120.0  # a connection without a request; its reader makes another
CONNECTIONS_MAX = 256  # of admitted nodes: a thread each, and they sleep
NOT_ADMITTED_MAX = 128  # connections that have proved nothing yet: who waits longest makes room
ACCEPT_PAUSE_S = 0.1  # when the system gives no connection: mostly for want of descriptors
CONNECTIONS_OF_NODE_MAX = 16

LOCK_S = 5.0  # from a lookup to its load; a reader that was paused longer asks again
LOCKS_OF_NODE_MAX = 1024  # objects
READ_SHARE = 0.5  # of the pool, under way to all nodes at once: slow readers leave its owner the rest
KINDS_S = 0.25  # how old what the helper knows of a namespace may be
KINDS_MAX = 4096
SERVER_S = 1.5  # without an answer of its server, and a helper asks before it answers a probe: 1.5 of its rounds

DIRECTORY_TTL_S = 10.0  # of a node's entry
DIRECTORY_PERIOD_S = 3.0  # three tries within it
DIRECTORY_CALL_S = 2.0
ENTRIES_AT_ONCE = 256  # keys in one exchange with Redis
ENTRIES_ROUND_S = 1.0  # of telling Redis, in one round of the thread that registers its node and lets locks expire
ENTRIES_TTL_S = 600.0  # of a key's entry; told again after a third of it, so what a dead node left goes by itself
DIGEST_PERIOD_S = 1.0
PULL_SHARE = 5  # bringing one peer's digest takes at most a fifth of a thread: a slow one is asked less often
DIGEST_BYTES_MIN = 64 << 10  # 32,768 objects with 16 bits each
DIGEST_HISTORY = 60  # versions: who asks once a minute still gets a difference
DIGEST_SHARE = 20  # a pass over the index takes at most a twentieth of a processor

LIES_MAX = 3  # wrong answers, and a peer is not asked for a while
LIES_PAUSE_S = 60.0
PAUSE_S = 0.5  # before a peer that failed is probed; twice as long each time
PAUSE_S_MAX = 8.0
ASKED_MAX = 3  # peers that are asked for one key, one after another
CHANNELS_MAX = 8  # idle connections to one peer
PEERS_SHOWN_MAX = 16  # rows in `status`, or what fits into its 8 KiB: those in trouble first, then the busiest
ERROR_SHOWN_CHARS = 100
FOUND_MAX = 65_536  # names that are known to be locked at a peer
