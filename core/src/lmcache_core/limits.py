"""Every limit of the system, with its reason. Units stand last in the name."""

from __future__ import annotations

# --- keys and objects -------------------------------------------------------------------------------------
KEY_BYTES = 32  # one SHA-256; the kernel never looks inside
PAGE_BYTES = 4096  # slots start on pages, so O_DIRECT and huge pages work on them as they are
SLAB_BYTES = 64 << 20  # large enough that a slab changes class rarely, small enough to populate in one step
SLAB_BYTES_MIN = 1 << 20  # in small pools: below this the tables cost more than they order
OBJECT_BYTES_MAX = 4 << 30  # one object is one contiguous run of slabs
POOL_BYTES_MAX = 1 << 46  # offsets stay exact in any tool that reads them as doubles
LAYOUTS_MAX = 1024  # rows in the pool's layout table
WORKERS_MAX = 1024  # rows (and life locks) in the pool's worker table
POOL_NAME_BYTES_MAX = 64  # the field in the pool's header; file names have room for a prefix
HUGE_PAGE_BYTES = 2 << 20  # data and mapping start on such a boundary: the kernel collapses aligned ranges only
READY_WAIT_S = 1.0  # "ready" waits so long for the first slabs; on a slow machine the first stores answer WARMING
POPULATE_STEP_BYTES = 64 << 20  # the room is asked again before each: an OOM kill comes without an errno
ROOM_RESERVE_BYTES_MAX = 128 << 20  # left to everyone else on the machine and in each control group
ROOM_RESERVE_FRACTION = 0.05  # of the machine or the control group, where that is less
INDEX_ENTRY_BYTES = 128  # two cache lines: key, place, checksum, generation
INDEX_ENTRIES_MAX = 1 << 28  # 32 GiB of index: twice the objects of 64 KiB that 8 TiB hold
INDEX_OBJECT_BYTES = 8 << 10  # the index has 5 entries for 4 of them, and up to the next power of two
INDEX_LOAD_MAX = 0.8  # of the entries: beyond it the windows of 64, in which a key has its place, fill up
INDEX_SWEEP_S = 1.0  # what workers read without a call is told to the eviction policy within that time
INDEX_SWEEP_KEYS_MAX = 1024  # told in one step: well below the loop's page of 2 ms
INDEX_SWEEP_PAUSE_S = 0.005  # between two full steps: what workers read takes a tenth of the loop at most
INDEX_SWEEP_ENTRIES_MIN = 1 << 16  # looked at in one step even if it is early: 128 KiB of marks, some 10 µs
INDEX_TIDY_ENTRIES = 4096  # walked in one step against tombstones
REPAIR_STEP_BYTES = 1 << 20  # of the tables, compared with what the server knows: some 0.2 ms of a turn
VERIFY_STEP_BYTES = 16 << 20  # of adopted objects, read at once beside serving: 2 ms of a thread, at most 8 under load
VERIFY_STEP_OBJECTS = 256  # picked and settled in one turn of the loop: some 0.2 ms of it
VERIFY_STEP_LOOKS = 4096  # at slots, in one turn, for these
VERIFY_LOG_S = 10.0  # a long check says so often how far it is
POPULATE_THREADS_MAX = 8  # a server's start may not take a large machine from everyone else
COPY_THREADS_MAX = 64  # of one job, whatever is asked for
COPY_THREADS_AUTO_MAX = 4  # of one job, if nothing is asked for: a few fill any memory bus

# --- protocol ---------------------------------------------------------------------------------------------
FRAME_BYTES_MAX = 64 << 10  # below SEQPACKET's default of 212,960 with room for several in flight
BATCH_KEYS_MAX = 1024  # keys in one frame: the kernel's work on it stays below 2 ms
STORE_PAGE_KEYS = 512  # keys a client stores with one call: each may cost an eviction, and others wait for the page
PAGE_JOBS_MAX = 64  # page jobs of one client under way at once, each with `copy_threads` threads of its own
OPERATION_KEYS_MAX = 1 << 20  # keys in one call of the client, in pages of BATCH_KEYS_MAX under one lease
ERROR_CHARS_MAX = 4096  # of an error's message: it may quote the request, and has to fit into a frame
SESSIONS_MAX = 4096  # two descriptors or three each: below the usual hard limit of open files
SESSIONS_PER_ORIGIN_MAX = SESSIONS_MAX // 4  # that map no pool, of one uid, CURVE key or address: others need room too
UNANSWERED_PER_UID_MAX = 256  # connections that have not said hello; who means well says it at once
LEASES_PER_SESSION_MAX = 4096  # a worker that leaks leases hurts itself only
LEASE_KEYS_MAX = OPERATION_KEYS_MAX
SETTLED_LEASES_REMEMBERED = 4096  # a repeated commit gets its first answer; enough for every reply in flight
SEND_QUEUE_FRAMES_MAX = 256  # a peer that does not read is dropped once this many replies wait for it
STORES_WAITING_MAX = 1024  # stores that wait for slabs, and as many for tiers; beyond it they are FULL at once
STORES_PER_SESSION_MAX = STORES_WAITING_MAX // 4  # of these: one worker in a hurry must leave room for others
ROOM_WAIT_S = 5.0  # for so long a grant waits for slabs to be emptied: half of what a call waits for its answer
LOOKUPS_WAITING_MAX = 1024  # replies held back for a prefetch
LOOKUPS_PER_SESSION_MAX = LOOKUPS_WAITING_MAX // 4  # of these: one scheduler in trouble must leave room for others
STORE_WAIT_S = 2.0  # a disk takes a page of a store in a fraction of that, where it keeps up at all
STORE_WAIT_S_MAX = 5.0  # half of what a client waits before it takes the server for hung
EXPLAIN_KEYS_MAX = 128  # keys explained by one frame: each may have a word from every tier
EXPLAIN_TIERS_MAX = 16
EXPLAINS_UNDER_WAY_MAX = 64  # explanations that wait for tiers, of all sessions
EXPLAINS_PER_SESSION_MAX = 8
STORED_WAITS_MAX = (
    256  # held answers to callers that wait until tiers have something: each is looked at whenever a store ends
)
STORED_WAITS_PER_SESSION_MAX = STORED_WAITS_MAX // 4
STORED_WAIT_S_MAX = 30.0  # one answer is held back no longer; a client that waits on asks again
ERROR_EXCERPT_CHARS_MAX = 200  # of a tier's or a policy's words, where they are kept or sent beside keys
JOBS_REMEMBERED = 1024  # a lookup that has ended can be asked about for a while …
JOB_KEYS_REMEMBERED = 1 << 17  # … as long as those remembered have no more keys together: about 13 MB
NAMESPACES_PER_SESSION_MAX = 1024  # registered at once; the oldest is forgotten, and registered again when it is used
NAMESPACES_PER_SESSION_KEPT = 16  # of these a session keeps, however many namespaces its user has in others
NAMESPACES_MAX = 1 << 17  # registered by all sessions together: some 40 MB
NAMESPACES_KNOWN_MAX = 1 << 14  # a client knows the layout of so many without asking: some 3 MB
OWED_FRAMES_MAX = 4096  # of what ends something, for a server that hangs: one for each lease there can be
SESSION_NAME_BYTES_MAX = 128

# --- leases -----------------------------------------------------------------------------------------------
WRITE_TTL_S = 600.0
READ_TTL_S = 300.0
PROMISE_TTL_S = 60.0  # between a scheduler's lookup and its worker's retrieve
PIN_TTL_S = 3600.0
QUARANTINE_FRACTION_MAX = 0.25  # of the pool, all sessions together: the rest goes on serving
QUARANTINE_FRACTION_PER_UID_MAX = 0.125
PINNED_FRACTION_MAX = 0.5  # pins that belong to the server
# What one session, and all sessions of one uid or CURVE key, keep from eviction: 7/8 and 15/16 of a pool together, so
# that whatever one of them does, there is room for the stores of others.
PROMISED_FRACTION_MAX = 0.25
PROMISED_FRACTION_PER_SESSION_MAX = 0.25  # over it a hit is a hit all the same, and nobody keeps it for the asker
READ_FRACTION_MAX = 0.5
READ_FRACTION_PER_SESSION_MAX = 0.5  # the KV of one prompt may be a third of a pool, and is read at once
PINNED_FRACTION_PER_HOLDER_MAX = 0.1875  # whether or not the sessions that pinned are there still
PINNED_FRACTION_PER_SESSION_MAX = 0.125
SHARED_FRACTION_PER_HOLDER_MAX = 0.875  # of each table, for one uid or key that has it alone: 882 of 1,008 worker rows
SHARE_FEW = 64  # who has less than one in so many is refused only where nothing is left: 15 worker rows
ROWS_RETURNING_MAX = (
    16  # of the worker table, for workers that come back and have their former row until they have attached
)

# --- tiers ------------------------------------------------------------------------------------------------
TIERING_STEP_S = 50e-6  # of a turn of the loop for what tiers are owed: a worker's next message waits behind it
LANE_NICE = 10  # a tenth of the loop's share of the processor, where there is not enough of it
STORE_CPU_FRACTION = 0.25  # of the machine, for stores to one tier on average: the rest is the engines'
LANE_QUEUE_MAX = 256  # batches waiting for a tier; beyond it the answer is THROTTLED
TIER_ERROR_KEPT_S = 60.0  # an error that nothing has confirmed since, of a tier that answers, is over
TIER_NAME_CHARS_MAX = 64  # it stands in every log line, metric and status, and in the names of threads
TIER_BATCH_KEYS_MAX = 64  # keys an adapter sees in one call, unless it asks for fewer
TIER_DEADLINE_S = 30.0
TIER_LOOKUP_S = 5.0  # a lookup does not wait longer than this for a tier to say what it has
TIER_BATCH_BYTES_MAX = 16 << 20  # bytes in one lane call: enough to stream, small enough to share between lanes
STORE_IN_FLIGHT_BYTES_MAX = 256 << 20  # pinned in the L1 because lanes read it
TIER_RETRIES_MAX = 3
TIER_RETRY_PAUSE_S = 0.05  # doubles with each attempt, with jitter
LANE_REPLACEMENTS_MAX = 2  # fresh threads for a lane whose calls hang past their deadline
BREAKER_FAILURES = 5  # calls in a row that failed before a tier is left alone
BREAKER_PAUSE_S = 0.5  # until the first probe; doubles up to BREAKER_PAUSE_MAX_S
BREAKER_PAUSE_MAX_S = 30.0
DIRTY_OBJECTS_MAX = 1 << 18  # objects waiting for one tier; beyond it the oldest is given up, and counted
SCRATCH_BYTES_MAX = 64 << 20  # buffers of one lane thread for encoding and decoding, unless one object needs more
CHAIN_SERDES_MAX = 8  # serdes in one codec chain: their lengths stand in the object's header
TIER_LOSSES_REMEMBERED = 1 << 14  # why a tier does not have a key: some 3 MB a tier at most
TIER_DOUBTS_MAX = (
    4096  # keys that a tier is asked about after calls that failed; what a longer outage leaves, a scan finds
)
OPERATION_THREADS = 2  # of all operations that packages brought
OPERATIONS_WAITING_MAX = 64  # calls of these; further ones are refused
OPERATION_SLOW_S = 0.002  # longer on the loop, and it is counted as slow
OPERATION_SAMPLE_BYTES_MAX = 4096  # that an operation may see of an object at once
TRACE_RECORD_BYTES_MAX = 1 << 20  # of a recording: a frame's keys are a tenth of it
RECORDS_WAITING_MAX = 10_000  # operations that wait to be written
OTEL_TIMEOUT_S_MAX = 4.0  # for a batch of spans: below the time after which a subscriber counts as hanging
SPANS_WAITING_MAX = 10_000  # that wait for a collector; further ones are dropped and counted
TRACED_STORES_MAX = 4096  # whose spans have not ended; beyond that the oldest one ends as it is
TRACED_OBJECTS_MAX = 65_536  # on their way to tiers, with the span of their store: some 15 MB
KV_EVENT_BATCH_HASHES = 4096  # of one KV event, and events of one batch of a snapshot
KV_EVENTS_PENDING_MAX = 65_536  # objects whose blocks were reported, and that are not stored yet
BLOCK_HASH_BYTES_MAX = 64  # of an engine: SHA-256 has 32
REPORT_HASHES_MAX = 512  # of engines' blocks, in one frame
REPORT_TOKENS_MAX = 4096  # in one frame, with 512 hashes of 64 bytes
TENANTS_MAX = 256  # with a quota; the victims of a store are shared out between them
TENANT_NAME_CHARS_MAX = 64  # it stands in metrics and every status
TENANT_NAMESPACES_MAX = 1024  # of one tenant, in one frame
QUOTAS_FRAME_BYTES = 32 << 10  # of an answer, before the last tenant in it
TIER_CHANGES_MAX = 8  # tiers being built at once while the server runs
TIER_CLOSE_S = 1.0  # an adapter's close is waited for no longer than this
TIER_WARNING_PAUSE_S = 30.0  # a tier in trouble logs no more often than this; `status` counts all of it
RECOUNT_PAUSE_S = 10.0  # between two scans that were asked for because accounts may be wrong
SCAN_PAUSE_S = 0.005  # between two pages of the scan that rebuilds a tier's accounting
ACCOUNTING_STEP_ENTRIES = 128  # scanned entries taken over in one turn of the loop
PREFETCH_IN_FLIGHT_MAX = 8
PREFETCHES_REMEMBERED = 1 << 16  # keys that were loaded from tiers lately: some 7 MB at most
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
EVENTS_CLOSE_S = 2.0  # at the end subscribers are waited for no longer than this

HELPERS_MAX = 16  # each is a process and a thread that waits for it
HELPER_PAUSE_S = 0.5  # before a helper that has ended is started again; doubles up to …
HELPER_PAUSE_S_MAX = 30.0
HELPER_STEADY_S = 60.0  # one that ran for so long begins with the first pause
HELPER_STOP_S = 5.0  # at the server's end; then it is killed

# --- time -------------------------------------------------------------------------------------------------
SWITCH_INTERVAL_S = 1e-4  # measured: a round trip beside a busy lane thread falls from 5.2 ms to 0.24 ms
LOOP_SLICE_S = 5e-4  # less than the usual 1.4 ms, more than a turn: who uses it up may wait for a tick of 4 ms
HOUSEKEEPING_S = 0.25  # headroom in the pool, and the other things that wait well
LIFE_CHECK_S_MIN = 0.002  # a lost session's life lock is looked at this soon, and ever less often up to …
LIFE_CHECK_S_MAX = 0.5
CALL_OBJECTS_MAX = 16 * BATCH_KEYS_MAX  # touched by one call into the kernel, each as often as it is
LIFE_CHECKS_PER_TURN_MAX = 64  # each is a system call or two; the others follow in the next turn
SILENT_SESSION_S = 600.0  # a ZMQ session without a life lock that says nothing for this long is ended
HELLO_S = 5.0  # for so long a connection may say nothing
LIMIT_WARNING_PAUSE_S = 1.0  # sessions ended to make room, and refused peers, are logged no more often
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 10.0  # far above the longest turn of a loop; a call that waited so long has met a hang
LINK_WAIT_S = 0.02  # a call waits so long for a link that is being made: fifty times what a healthy server needs …
LINK_WAIT_PAUSE_S = 1.0  # … and this often: a server that does not come costs its callers 2 %
LINK_RETRY_S = 0.05  # between two attempts at a local socket: 20 µs each, and a new server is met within it
LINK_RETRY_S_MAX = 1.0  # where an attempt costs more, the pause doubles up to this
LINK_LOOK_S = 0.1  # a client that only reads the index notices the end of its server after so long
LINK_STEP_S = 0.001  # between two steps that pure index hits take while a link is being made
ZMQ_DESCRIPTORS = 16  # what one connection over ZMQ takes, and a few more: its library aborts where it runs out of them
HANDSHAKE_S_MAX = 60.0  # one that hangs for so long is given up and begun anew: a frame may have been lost
CLOSE_TIMEOUT_S = (
    5.0  # a client that is closed waits so long for copies of its other threads: any batch is copied by then
)
