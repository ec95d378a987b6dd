"""Every limit of the system, with its reason. Names end with the unit."""

from __future__ import annotations

# --- keys and objects -------------------------------------------------------------------------------------
KEY_BYTES = 32  # one SHA-256; the kernel never looks inside
PAGE_BYTES = 4096  # slots start on pages, so O_DIRECT and huge pages work on them
SLAB_BYTES = 64 << 20  # large enough that a slab changes class rarely, small enough to populate in one step
SLAB_BYTES_MIN = 1 << 20  # in small pools: with smaller slabs the tables cost more than they save
OBJECT_BYTES_MAX = 4 << 30  # one object is one contiguous run of slabs
POOL_BYTES_MAX = 1 << 46  # offsets stay exact in any tool that reads them as doubles
LAYOUTS_MAX = 1024  # rows in the pool's layout table
WORKERS_MAX = 1024  # rows (and life locks) in the pool's worker table
POOL_NAME_BYTES_MAX = 64  # the field in the pool's header; file names have room for a prefix
HUGE_PAGE_BYTES = 2 << 20  # data and mapping start on such a boundary: the kernel collapses only aligned ranges
READY_WAIT_S = 1.0  # "ready" waits this long for the first slabs; on slow machines the first stores answer WARMING
POPULATE_STEP_BYTES = 64 << 20  # free memory is checked again before each step: an OOM kill comes without an errno
ROOM_RESERVE_BYTES_MAX = 128 << 20  # left free for other processes on the machine and in each control group
ROOM_RESERVE_FRACTION = 0.05  # of the machine or the control group, if that is less
INDEX_ENTRY_BYTES = 128  # two cache lines: key, offset, checksum, generation
INDEX_ENTRIES_MAX = 1 << 28  # 32 GiB of index: twice the objects of 64 KiB that 8 TiB hold
INDEX_OBJECT_BYTES = 8 << 10  # 5 entries for 4 objects of this size, rounded up to a power of two
INDEX_LOAD_MAX = 0.8  # of the entries: beyond it, the 64-entry windows in which a key is stored fill up
INDEX_SWEEP_S = 1.0  # the eviction policy learns within this time what workers read without a call
INDEX_SWEEP_KEYS_MAX = 1024  # reads reported in one step: well below the loop's page of 2 ms
INDEX_SWEEP_PAUSE_S = 0.005  # between two full steps: reporting what workers read takes at most a tenth of the loop
INDEX_SWEEP_ENTRIES_MIN = 1 << 16  # scanned in one step even if it is early: 128 KiB of marks, about 10 µs
INDEX_TIDY_ENTRIES = 4096  # scanned in one step to remove tombstones
REPAIR_STEP_BYTES = 1 << 20  # of the tables, compared with the server's state in one step: about 0.2 ms of a turn
VERIFY_STEP_BYTES = 16 << 20  # of adopted objects, read in one go while serving: 2 ms of a thread, at most 8 under load
VERIFY_STEP_OBJECTS = 256  # picked and settled in one turn of the loop: about 0.2 ms
VERIFY_STEP_LOOKS = 4096  # slots inspected in one turn to find these
VERIFY_LOG_S = 10.0  # how often a long check logs its progress
POPULATE_THREADS_MAX = 8  # a starting server may not take a large machine from everything else
COPY_THREADS_MAX = 64  # of one job, even if more are requested
COPY_THREADS_AUTO_MAX = 4  # of one job by default: a few fill any memory bus

# --- protocol ---------------------------------------------------------------------------------------------
FRAME_BYTES_MAX = 64 << 10  # below SEQPACKET's default of 212,960 with room for several in flight
BATCH_KEYS_MAX = 1024  # keys in one frame: the kernel's work on it stays below 2 ms
STORE_PAGE_KEYS = 512  # keys that a client stores in one call: each may cost an eviction, and other requests wait
PAGE_JOBS_MAX = 64  # page jobs of one client at once, each with `copy_threads` threads of its own
OPERATION_KEYS_MAX = 1 << 20  # keys in one call of the client, in pages of BATCH_KEYS_MAX under one lease
ERROR_CHARS_MAX = 4096  # of an error's message: it may quote the request, and has to fit into a frame
SESSIONS_MAX = 4096  # two or three descriptors each: below the usual hard limit of open files
SESSIONS_PER_ORIGIN_MAX = SESSIONS_MAX // 4  # without a pool, of one uid, CURVE key or address: others need places, too
UNANSWERED_PER_UID_MAX = 256  # connections that have not said hello; honest clients say it at once
LEASES_PER_SESSION_MAX = 4096  # a worker that leaks leases hurts only itself
LEASE_KEYS_MAX = OPERATION_KEYS_MAX
SETTLED_LEASES_REMEMBERED = 4096  # a repeated commit gets its first answer; enough for every reply in flight
SEND_QUEUE_FRAMES_MAX = 256  # a peer is disconnected once this many replies wait for it to read
STORES_WAITING_MAX = 1024  # stores that wait for slabs, and as many for tiers; further ones are FULL at once
STORES_PER_SESSION_MAX = STORES_WAITING_MAX // 4  # of these: a busy worker must leave room for others
ROOM_WAIT_S = 5.0  # how long a grant waits for slabs to be emptied: half of what a call waits for its answer
LOOKUPS_WAITING_MAX = 1024  # replies held back for a prefetch
LOOKUPS_PER_SESSION_MAX = LOOKUPS_WAITING_MAX // 4  # of these: a scheduler in trouble must leave room for others
STORE_WAIT_S = 2.0  # a disk that keeps up takes a page of a store in a fraction of that
STORE_WAIT_S_MAX = 5.0  # half of the time after which a client considers the server hung
EXPLAIN_KEYS_MAX = 128  # keys explained by one frame: every tier may add a sentence to each
EXPLAIN_TIERS_MAX = 16
EXPLAINS_UNDER_WAY_MAX = 64  # explanations of all sessions that wait for tiers
EXPLAINS_PER_SESSION_MAX = 8
# Callers that wait until tiers have something: each is checked whenever a store ends.
STORED_WAITS_MAX = 256
STORED_WAITS_PER_SESSION_MAX = STORED_WAITS_MAX // 4
STORED_WAIT_S_MAX = 30.0  # an answer is held back no longer than this; a client that still waits asks again
ERROR_EXCERPT_CHARS_MAX = 200  # of a tier's or a policy's error, when kept or sent beside keys
JOBS_REMEMBERED = 1024  # a finished lookup can be asked about for a while …
JOB_KEYS_REMEMBERED = 1 << 17  # … as long as the remembered ones have no more keys than this in total: about 13 MB
NAMESPACES_PER_SESSION_MAX = 1024  # at once; then the oldest is forgotten, and registered again on its next use
NAMESPACES_PER_SESSION_KEPT = 16  # of these a session always keeps, however many its user has in other sessions
NAMESPACES_MAX = 1 << 17  # registered by all sessions together: about 40 MB
NAMESPACES_KNOWN_MAX = 1 << 14  # whose layout a client knows without asking: about 3 MB
OWED_FRAMES_MAX = 4096  # frames that end something, for a server that hangs: one for each possible lease
SESSION_NAME_BYTES_MAX = 128

# --- leases -----------------------------------------------------------------------------------------------
WRITE_TTL_S = 600.0
READ_TTL_S = 300.0
PROMISE_TTL_S = 60.0  # between a scheduler's lookup and its worker's retrieve
PIN_TTL_S = 3600.0
QUARANTINE_FRACTION_MAX = 0.25  # of the pool, all sessions together: the rest stays in service
QUARANTINE_FRACTION_PER_UID_MAX = 0.125
PINNED_FRACTION_MAX = 0.5  # of the pool; pins belong to the server, not to a session
# What one session, and all sessions of one uid or CURVE key, keep from eviction: at most 7/8 and 15/16 of a pool, so
# that there is always room for the stores of others.
# that whatever one of them does, there is room for the stores of others.
PROMISED_FRACTION_MAX = 0.25
PROMISED_FRACTION_PER_SESSION_MAX = 0.25  # beyond it a hit is still a hit, but it is not held for the caller
READ_FRACTION_MAX = 0.5
READ_FRACTION_PER_SESSION_MAX = 0.5  # the KV of one prompt may be a third of a pool, and is read at once
PINNED_FRACTION_PER_HOLDER_MAX = 0.1875  # including pins of sessions that have ended
PINNED_FRACTION_PER_SESSION_MAX = 0.125
SHARED_FRACTION_PER_HOLDER_MAX = 0.875  # of each table, for a uid or key that uses it alone: 882 of 1,008 worker rows
SHARE_FEW = 64  # a holder of less than 1/64 is refused only if nothing is left: 15 worker rows
# Of the worker table, for workers that come back and keep their former row until they have attached.
ROWS_RETURNING_MAX = 16

# --- tiers ------------------------------------------------------------------------------------------------
TIERING_STEP_S = 50e-6  # of a turn of the loop for the tiers' work: a worker's next message waits behind it
LANE_NICE = 10  # gives the lanes a tenth of the loop's share when processor time is short
STORE_CPU_FRACTION = 0.25  # of the machine, for stores to one tier on average: the rest belongs to the engines
LANE_QUEUE_MAX = 256  # batches waiting for a tier; beyond it the answer is THROTTLED
TIER_ERROR_KEPT_S = 60.0  # the last error of a tier that answers is cleared after this time, if none follows
TIER_NAME_CHARS_MAX = 64  # it appears in every log line, metric and status, and in thread names
TIER_BATCH_KEYS_MAX = 64  # keys an adapter sees in one call, unless it asks for fewer
TIER_DEADLINE_S = 30.0
TIER_LOOKUP_S = 5.0  # a lookup waits no longer than this for a tier to say what it has
TIER_BATCH_BYTES_MAX = 16 << 20  # bytes in one lane call: enough to stream, small enough to share between lanes
STORE_IN_FLIGHT_BYTES_MAX = 256 << 20  # pinned in the L1 while lanes read it
TIER_RETRIES_MAX = 3
TIER_RETRY_PAUSE_S = 0.05  # doubles with each attempt, with jitter
LANE_REPLACEMENTS_MAX = 2  # fresh threads for a lane whose calls hang past their deadline
BREAKER_FAILURES = 5  # consecutive failed calls after which a tier is left alone
BREAKER_PAUSE_S = 0.5  # until the first probe; doubles up to BREAKER_PAUSE_MAX_S
BREAKER_PAUSE_MAX_S = 30.0
DIRTY_OBJECTS_MAX = 1 << 18  # objects that wait for one tier; beyond it the oldest is dropped and counted
SCRATCH_BYTES_MAX = 64 << 20  # encoding and decoding buffers of one lane thread, unless a single object needs more
CHAIN_SERDES_MAX = 8  # serdes in one codec chain: the object's header stores their lengths
TIER_LOSSES_REMEMBERED = 1 << 14  # reasons why a tier does not have a key: at most 3 MB for each tier
# Keys that a tier is asked about after failed calls; after a longer outage, a scan finds the rest.
TIER_DOUBTS_MAX = 4096
OPERATION_THREADS = 2  # of all operations that plugins add
OPERATIONS_WAITING_MAX = 64  # calls of plugins' operations; further ones are refused
OPERATION_SLOW_S = 0.002  # an operation that takes longer on the loop is counted as slow
OPERATION_SAMPLE_BYTES_MAX = 4096  # of an object that an operation may read at once
TRACE_RECORD_BYTES_MAX = 1 << 20  # of a recording: a frame's keys are a tenth of it
RECORDS_WAITING_MAX = 10_000  # recorded operations that wait to be written
OTEL_TIMEOUT_S_MAX = 4.0  # for a batch of spans: below the time after which a subscriber counts as hung
SPANS_WAITING_MAX = 10_000  # spans that wait for a collector; further ones are dropped and counted
LATE_ANSWERS_MAX = 4096  # requests to be answered later that a recording, or tracing, remembers: 3072 can wait
TRACED_STORES_MAX = 4096  # stores whose spans have not ended; beyond it the oldest span ends as it is
TRACED_OBJECTS_MAX = 65_536  # objects on their way to tiers, with the span of their store: about 15 MB
KV_EVENT_BATCH_HASHES = 4096  # of one KV event, and events in one batch of a snapshot
KV_EVENTS_PENDING_MAX = 65_536  # objects whose blocks were reported but that are not stored yet
BLOCK_HASH_BYTES_MAX = 64  # of an engine's block hash: SHA-256 has 32
REPORT_HASHES_MAX = 512  # of engines' blocks, in one frame
REPORT_TOKENS_MAX = 4096  # in one frame, with 512 hashes of 64 bytes
TENANTS_MAX = 256  # with a quota; a store picks its victims among them
TENANT_NAME_CHARS_MAX = 64  # it appears in metrics and every status
TENANT_NAMESPACES_MAX = 1024  # of one tenant, in one frame
QUOTAS_FRAME_BYTES = 32 << 10  # of an answer, before the last tenant in it is added
TIER_CHANGES_MAX = 8  # tiers being built at once while the server runs
TIER_CLOSE_S = 1.0  # how long the server waits for an adapter to close
TIER_WARNING_PAUSE_S = 30.0  # pause between two warnings about a tier in trouble; `status` counts them all
RECOUNT_PAUSE_S = 10.0  # between two scans that are requested because accounts may be wrong
SCAN_PAUSE_S = 0.005  # between two pages of the scan that rebuilds a tier's accounting
ACCOUNTING_STEP_ENTRIES = 128  # scanned entries processed in one turn of the loop
PREFETCH_IN_FLIGHT_MAX = 8
PREFETCHES_REMEMBERED = 1 << 16  # keys that were recently loaded from tiers: at most 7 MB
DRAIN_S = 30.0
CHUNK_TOKENS = 256
L1_WATERMARK = 0.8
EVICT_RATIO = 0.2

# --- events and figures -------------------------------------------------------------------------------------
EVENT_BUS_QUEUE_SIZE = 10_000  # what may wait for subscribers; what comes on top is dropped and counted
EVENT_BUS_OBJECTS_MAX = 1 << 18  # objects that these keep in memory: some 60 MB
EVENT_BATCH_MAX = 4096  # events told at once: some milliseconds of a subscriber that writes a line for each
EVENT_BATCH_OBJECTS = 1024  # and the objects that they are of
EVENT_REST_S_MAX = 0.01  # their thread rests for as long as a batch took, so that the loop has its turns in between
EVENT_QUIET_S = 0.003  # the loop has waited so long for something to do: subscribers may have the interpreter
EVENT_PATIENCE_S = 1.0  # how long an event waits for that at most
EVENT_BATCH_S = 0.02  # a moment for more events to come: their thread wakes up no more often than that
SPAN_BATCH_S = 0.5  # the same for spans: each export is an HTTP request, and costs the loop's thread 2 ms
TRAFFIC_NAMESPACES_SHOWN_MAX = 50  # each is a label of several metrics; the rest are `other`
TRAFFIC_TIERS_MAX = 64  # counted by name, those that were removed among them; what comes later is `other`
TRAFFIC_NAMESPACES_MAX = 1024  # counted by themselves; what comes later is counted together
# What a worker says that it did within a second, at most: what is beyond is not believed.
TALLY_HITS_PER_S_MAX = 10**10  # a core finds some 70 million keys
TALLY_BYTES_PER_S_MAX = 1 << 44
TALLY_THREADS_MAX = 4096  # of one worker, all of them reading
TALLY_SLACK_S = 1.0  # a look may come at once after another
SUBSCRIBER_HANG_S = 5.0  # who does not come back from a batch for so long is told nothing more
SUBSCRIBER_RETRY_S = (
    1.0  # one that may recover, a file on a full disk say, is tried again after so long; doubles up to …
)
SUBSCRIBER_RETRY_S_MAX = 60.0
EVENTS_CLOSE_S = 2.0  # at the end the first subscriber that hangs is waited for so long, and all others together

HELPERS_MAX = 16  # each is a process and a thread that waits for it
HELPER_PAUSE_S = 0.5  # before a helper that has ended is started again; doubles up to …
HELPER_PAUSE_S_MAX = 30.0
HELPER_STEADY_S = 60.0  # a helper that ran this long starts again with the first pause
HELPER_STOP_S = 5.0  # when the server stops; then the helper is killed

# --- time -------------------------------------------------------------------------------------------------
SWITCH_INTERVAL_S = 1e-4  # measured: a round trip beside a busy lane thread falls from 5.2 ms to 0.24 ms
LOOP_SLICE_S = 5e-4  # below the usual 1.4 ms, above a turn: a thread that uses it up may wait for a tick of 4 ms
HOUSEKEEPING_S = 0.25  # interval of the pool's headroom check and of other work that can wait
LIFE_CHECK_S_MIN = 0.002  # first pause between checks of a lost session's life lock; it grows up to …
LIFE_CHECK_S_MAX = 0.5
CALL_OBJECTS_MAX = 16 * BATCH_KEYS_MAX  # touched by one call into the kernel, counted as often as they are named
LIFE_CHECKS_PER_TURN_MAX = 64  # each is one or two system calls; the others follow in the next turn
SILENT_SESSION_S = 600.0  # a ZMQ session without a life lock ends after this silence
HELLO_S = 5.0  # how long a connection may take to say hello
LIMIT_WARNING_PAUSE_S = 1.0  # pause between two log lines about sessions ended to make room, and about refused peers
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 10.0  # far above the longest turn of a loop; a call that waited this long has met a hang
LINK_WAIT_S = 0.02  # how long a call waits for a link that is being made: fifty times what a healthy server needs …
LINK_WAIT_PAUSE_S = 1.0  # … and how often: an absent server costs its callers 2 %
LINK_RETRY_S = 0.05  # between two attempts at a local socket: 20 µs each, so a new server is found within this time
LINK_RETRY_S_MAX = 1.0  # if an attempt costs more, the pause doubles up to this
LINK_LOOK_S = 0.1  # a client that only reads the index notices the end of its server within this time
LINK_STEP_S = 0.001  # between two steps of pure index hits while a link is being made
ZMQ_DESCRIPTORS = 16  # what one connection over ZMQ needs, plus a few: its library aborts when it runs out of them
HANDSHAKE_S_MAX = 60.0  # a handshake that hangs this long is abandoned and begun again: a frame may have been lost
# How long a closing client waits for copies of its other threads: any batch is copied by then.
CLOSE_TIMEOUT_S = 5.0
