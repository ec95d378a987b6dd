"""Every limit of the system, with its reason. Names end with the unit."""

from __future__ import annotations

# --- keys and objects -------------------------------------------------------------------------------------
KEY_BYTES = 32  # one SHA-256; the kernel never looks inside
PAGE_BYTES = 4096  # slots start on pages, so O_DIRECT and huge pages work on them
SLAB_BYTES = 64 << 20  # large enough that a slab changes class rarely, small enough to populate in one step
SLAB_BYTES_MIN = 1 << 20  # in small pools: with smaller slabs the tables cost more than they save
OBJECT_BYTES_MAX = 4 << 30  # one object is one contiguous run of slabs
POOL_BYTES_MAX = 1 << 46  # offsets stay exact in any tool that reads them as doubles
DIMENSIONS_MAX = 32  # of an object: torch has 64 at most, and no KV has more than eight
LAYOUTS_MAX = 1024  # rows in the pool's layout table
WORKERS_MAX = 1024  # rows (and life locks) in the pool's worker table
POOL_NAME_BYTES_MAX = 64  # the field in the pool's header; file names have room for a prefix
CLAIM_BACKLOG = 64  # of a socket at which nobody is served: once it is full, it still shows that its owner lives
CLAIM_CONTENTION_S = 0.5  # a claim younger than this may be one of several that came at the same time
CLAIM_PAUSE_S = 0.01  # and up to four times that, before a server that met such a claim tries again
CLAIM_TRIES_MAX = 100
HUGE_PAGE_BYTES = 2 << 20  # data and mapping start on such a boundary: the kernel collapses only aligned ranges
READY_WAIT_S = 10.0  # "ready" waits this long for the first slabs; without any the first stores answer WARMING
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
POPULATE_AGAIN_S = 1.0  # before memory that was short is asked for again; doubles up to …
POPULATE_AGAIN_S_MAX = 30.0
POPULATE_THREADS_MAX = 8  # a starting server may not take a large machine from everything else
COPY_THREADS_MAX = 64  # of one job, even if more are requested
COPY_THREADS_AUTO_MAX = 4  # of one job by default: a few fill any memory bus

# --- settings ---------------------------------------------------------------------------------------------
SETTINGS_FILE_BYTES_MAX = 4 << 20  # thousands of tenants fit; a log or an image given by mistake is refused
SECRET_BYTES_MAX = 64 << 10  # a password, a token, a chain of certificates
SETTINGS_MAX = 100_000  # in one file: aliases of YAML make as many as one likes out of a few lines
SETTINGS_DEPTH_MAX = 32  # tables in tables: no model has ten

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
UNREAD_PAUSE_FRAMES = SEND_QUEUE_FRAMES_MAX // 2  # waiting for a peer: its requests wait, too, until it reads …
UNREAD_PAUSE_BYTES = 256 << 10  # … more than a client asks for before it reads, with the 200 KiB of the socket
UNREAD_PAUSE_HOLDER_BYTES = 16 << 20  # … and from here on any frame that waits is enough
# Bytes of the server's own memory that are kept for one connection, for one uid or CURVE key, and for all.
MEMORY_BYTES_MAX = {
    "unread": (1 << 20, 96 << 20, 192 << 20),  # replies: one of the largest for each of 1,024 connections, and room
    "leases": (32 << 20, 128 << 20, 256 << 20),  # three leases of OPERATION_KEYS_MAX, or 4,096 of 800 keys
    "requests": (32 << 20, 128 << 20, 256 << 20),  # lookups, at some 150 bytes a key: 200 of BATCH_KEYS_MAX
    # Counted, and bounded elsewhere: by connections, namespaces, pinned bytes, and the positions of leases.
    "sessions": (1 << 20, 64 << 20, 128 << 20),
    "holds": (128 << 20, 128 << 20, 256 << 20),
}
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
LABEL_CHARS_MAX = 80  # of a namespace: a model, a dtype and a shard; one line of a table
LABELS_KEPT_MAX = 1024  # of namespaces that no session uses, but of which the pool has objects
NAMESPACES_SHOWN_MAX = 50  # in `status`; each is a label of a metric
FINGERPRINTS_KEPT_MAX = 4096  # of files of weights, in a process: as many as a large model and its adapters have
NAMESPACES_KNOWN_MAX = 1 << 14  # whose layout a client knows without asking: about 3 MB
PLUGIN_STATUS_BYTES_MAX = 8192  # of one companion, operation or tracer: all share one frame
OWED_FRAMES_MAX = 4096  # frames that end something, for a server that hangs: one for each possible lease
SESSION_NAME_BYTES_MAX = 128
CLIENT_ID_BYTES = 16
WORDS_CHARS_MAX = 1024  # of a name in a message: a model's may be a path
PID_MAX = (1 << 31) - 1  # Linux ends at 2**22; the worker table has 32 bits
SIZE_BYTES_MAX = (1 << 63) - 1  # of a setting: an offset in a file, and a number of a message, is no larger
SECONDS_MAX = 1e9  # of a duration in a message: 31 years, so a sum with a clock stays exact to a microsecond

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
PROMISED_FRACTION_MAX = 0.25
PROMISED_FRACTION_PER_SESSION_MAX = 0.25  # beyond it a hit is still a hit, but it is not held for the caller
READ_FRACTION_MAX = 0.5
READ_FRACTION_PER_SESSION_MAX = 0.5  # the KV of one prompt may be a third of a pool, and is read at once
PINNED_FRACTION_PER_HOLDER_MAX = 0.1875  # including pins of sessions that have ended
PINNED_FRACTION_PER_SESSION_MAX = 0.125
WRITTEN_FRACTION_MAX = 0.875  # of the pool, open to write for one uid or key: the others can store, too
SHARED_FRACTION_PER_HOLDER_MAX = 0.875  # of each table, for a uid or key that uses it alone: 882 of 1,008 worker rows
SHARE_FEW = 64  # a holder of less than 1/64 is refused only if nothing is left: 15 worker rows
# Of the worker table, for workers that come back and keep their former row until they have attached.
ROWS_RETURNING_MAX = 16
UNLOCKED_ROWS_TRIED = 8  # for one whose lock is free, before a worker with a life token gets any of them

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
LANE_STUCK_S = 1.0  # a lane whose threads all hang for this long is stuck, however little time its callers gave
HANGING_TIER_S = 3.0  # at the end of a server, without any return: a tier whose calls hang is waited for no longer
LANE_REPLACEMENTS_MAX = 2  # fresh threads for a lane whose calls hang past their deadline
BREAKER_FAILURES = 5  # consecutive failed calls after which a tier's circuit breaker opens
BREAKER_PAUSE_S = 0.5  # until the first probe; doubles up to BREAKER_PAUSE_MAX_S
BREAKER_PAUSE_MAX_S = 30.0
WRITE_BACK_LOOKS = 64  # slots looked at in one step, for objects that a tier lacks: some 20 µs
WRITE_BACK_PAUSE_S = 1.0  # before the L1 is compared with a tier again because stores were lost; doubles up to …
WRITE_BACK_PAUSE_S_MAX = 60.0  # … so that an object that a tier refuses each time costs next to nothing
DIRTY_OBJECTS_MAX = 1 << 18  # objects that wait for one tier; beyond it the oldest is dropped and counted
SCRATCH_BYTES_MAX = 64 << 20  # encoding and decoding buffers of one lane thread, unless a single object needs more
CHAIN_SERDES_MAX = 8  # serdes in one codec chain: the object's header stores their lengths
TIER_LOSSES_REMEMBERED = 1 << 14  # reasons why a tier does not have a key: at most 3 MB for each tier
# Keys that a tier is asked about after failed calls; after a longer outage, a scan finds the rest.
TIER_DOUBTS_MAX = 4096
TIER_DROPPED_MAX = 65_536  # keys whose delete is not done; beyond it a delete that fails may leave the oldest
TIER_SUSPECTS_MAX = 4096  # objects whose last load looked damaged; beyond it the oldest is forgotten
SUSPECTS_BULK = 8  # as many look damaged at once only if the way to the medium is broken: nothing is deleted then
SECOND_LOOK_S = 5.0  # until an object that looked damaged is read again; doubles up to SECOND_LOOK_MAX_S
SECOND_LOOK_MAX_S = 600.0
TIER_STRANGERS_MAX = 4096  # names in our form whose objects are not ours; beyond it the oldest is looked at again
STRANGER_S = 3600.0  # until such an object is looked at again: the way to it may have been broken
SCAN_TRIES_MAX = 6  # failed pages in a row after which a tier serves with the accounts of its own stores
FRUITLESS_EVICTIONS_MAX = 2  # for a full medium that takes nothing afterwards: then its objects stay
OPERATION_THREADS = 2  # of all operations that plugins add
OPERATIONS_WAITING_MAX = 64  # calls of plugins' operations; further ones are refused
OPERATIONS_PER_SESSION_MAX = OPERATIONS_WAITING_MAX // 4  # of these: a busy router must leave room for operators
OPERATION_SLOW_S = 0.002  # an operation that takes longer on the loop is counted as slow
OPERATION_SAMPLE_BYTES_MAX = 4096  # of an object that an operation may read at once
LATE_ANSWERS_MAX = 4096  # requests to be answered later that a watch, or tracing, remembers: 3072 can wait
BLOCK_HASH_BYTES_MAX = 64  # of an engine's block hash: SHA-256 has 32
REPORT_HASHES_MAX = 512  # of engines' blocks, in one frame
REPORT_TOKENS_MAX = 4096  # in one frame, with 512 hashes of 64 bytes
TENANTS_MAX = 256  # with a quota; a store picks its victims among them
TENANT_NAME_CHARS_MAX = 64  # it appears in metrics and every status
TENANT_NAMESPACES_MAX = 1024  # of one tenant, in one frame
QUOTAS_FRAME_BYTES = 32 << 10  # of an answer, before the last tenant in it is added
TIER_CHANGES_MAX = 8  # tiers being built at once while the server runs
SETTINGS_MODELS_MAX = 128  # kept for the next change of a tier; each takes 20 to 100 KB
TIER_CLOSE_S = 1.0  # how long the server waits for an adapter to close
TIER_WARNING_PAUSE_S = 30.0  # pause between two warnings about a tier in trouble; `status` counts them all
RECOUNT_PAUSE_S = 10.0  # between two scans that are requested because accounts may be wrong
SCAN_PAUSE_S = 0.005  # between two pages of the scan that rebuilds a tier's accounting
ACCOUNTING_STEP_ENTRIES = 128  # scanned entries processed in one turn of the loop
PREFETCH_IN_FLIGHT_MAX = 8
PREFETCHES_REMEMBERED = 1 << 16  # keys that were recently loaded from tiers: at most 7 MB
DRAIN_S = 30.0
CHUNK_TOKENS_MAX = 1 << 20  # a prompt of a million tokens is one chunk then
CHUNK_TOKENS = 256
L1_WATERMARK = 0.8
EVICT_RATIO = 0.2
CERTIFICATE_BYTES_MAX = 1 << 20  # a few hundred bytes a chain
DIVERGENCE_MAX = 0.01  # nats a token: what four bits a value cost a small model
AGREEMENT_MIN = 0.9

# --- plugins ------------------------------------------------------------------------------------------------
PLUGIN_S = 15.0  # for one import or hook at start: ten times what the slowest of ours takes on a loaded machine
PLUGIN_GRACE_S = 5.0  # after its limit, what no signal could end is named on standard error
COMPONENT_IMPORT_S = 180.0  # of a component that the settings name: torch from a cold network disk takes a minute
PLUGIN_ERROR_CHARS_MAX = 400  # of a plugin's exception in a refusal: the reason, not a page

# --- events and figures -------------------------------------------------------------------------------------
EVENT_BUS_QUEUE_SIZE = 10_000  # what may wait for subscribers; what comes on top is dropped and counted
EVENT_BUS_OBJECTS_MAX = 1 << 18  # objects that these keep in memory: some 60 MB
EVENT_BATCH_MAX = 4096  # events passed on at once: some milliseconds of a subscriber that writes a line for each
EVENT_BATCH_OBJECTS = 1024  # and the objects that they are of
EVENT_REST_S_MAX = 0.01  # their thread rests for as long as a batch took, so that the loop has its turns in between
EVENT_QUIET_S = 0.003  # the loop has waited so long for something to do: subscribers may have the interpreter
EVENT_PATIENCE_S = 1.0  # how long an event waits for that at most
EVENT_BATCH_S = 0.02  # a moment for more events to come: their thread wakes up no more often than that
TRAFFIC_NAMESPACES_SHOWN_MAX = 50  # each is a label of several metrics; the rest are `other`
TRAFFIC_TIERS_MAX = 64  # counted by name, those that were removed among them; what comes later is `other`
TRAFFIC_NAMESPACES_MAX = 1024  # counted by themselves; what comes later is counted together
# What a worker says that it did within a second, at most: what is beyond is not believed.
TALLY_HITS_PER_S_MAX = 10**10  # a core finds some 70 million keys
TALLY_BYTES_PER_S_MAX = 1 << 44
TALLY_TOKENS_PER_S_MAX = 10**12  # of prompts that are looked up: with keys of some hundred tokens
TALLY_THREADS_MAX = 4096  # of one worker, all of them reading
TALLY_SLACK_S = 1.0  # a look may come at once after another
SUBSCRIBER_HANG_S = 5.0  # a subscriber that does not return from a batch for so long is disabled
SUBSCRIBER_RETRY_S = (
    1.0  # one that may recover, a file on a full disk say, is tried again after so long; doubles up to …
)
SUBSCRIBER_RETRY_S_MAX = 60.0
EVENTS_CLOSE_S = 2.0  # at the end the first subscriber that hangs is waited for so long, and all others together

HELPERS_MAX = 16  # each is a process and a thread that waits for it
HELPER_PAUSE_S = 0.5  # before a helper that ended soon after the last start is started again; doubles up to …
HELPER_PAUSE_S_MAX = 30.0
HELPER_STEADY_S = 10.0  # a helper that ran this long is started again at once, like one that ends for the first time
HELPER_STOP_S = 5.0  # when the server stops; then the helper is killed

# --- time -------------------------------------------------------------------------------------------------
SWITCH_INTERVAL_S = 1e-4  # measured: a round trip beside a busy lane thread falls from 5.2 ms to 0.24 ms
LOOP_SLICE_S = 5e-4  # below the usual 1.4 ms, above a turn: a thread that uses it up may wait for a tick of 4 ms
# One wait of a socket or lock: deadlines may be further away, even infinite, but these count at most some 24 days.
WAIT_S_MAX = 1e6

# Files that outlive the server (epochs, quotas) are written on a thread of their own. A write to a disk takes
# milliseconds; after STATE_CALL_S its caller is answered that it is late.
STATE_CALL_S = 5.0
STATE_CALLS_MAX = 1024  # changes that wait for the state directory
STATE_THREADS_LEFT_MAX = 4  # that hang in a call on it: more would only hang, too
QUOTA_CHANGES_MAX = 64  # that wait for those before them
LOG_LINES_MAX = 10_000  # that wait for whoever takes the log: some megabytes
STATE_FILE_BYTES_MAX = 1 << 30  # what a start reads at most: a clear each second for half a year, and no sparse file
STATE_TRIES_MAX = 100  # of a clear: other servers may clear at the same moments
STATE_END_S = 1.0  # how long the end of the server waits for them
NAME_REMOVE_S = 2.0  # of a server that ends: a directory that hangs keeps the name
START_STEP_S = 30.0  # for a directory of the settings, or a plugin that opens its own: then the start fails
STATE_COMPACT_LINES = 10_000  # of a file, from which on a start writes it anew if most lines say nothing any more
STATE_LINE_NAMESPACES = 256  # in a line then: a decoder holds the interpreter for as long as a line takes

HOUSEKEEPING_S = 0.25  # interval of the pool's headroom check and of other work that can wait
LIFE_CHECK_S_MIN = 0.002  # first pause between checks of a lost session's life lock; it grows up to …
LIFE_CHECK_S_MAX = 0.5
CALL_OBJECTS_MAX = 16 * BATCH_KEYS_MAX  # touched by one call into the kernel, counted as often as they are named
LIFE_CHECKS_PER_TURN_MAX = 64  # each is one or two system calls; the others follow in the next turn
PROMISES_CANCELLED_MAX = (
    64  # of the latest answers of a session: a cancel that crosses one on its way frees its promise
)
NAMES_LOOK_S = 1.0  # pause between two looks at the names at which clients find the server
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
ZMQ_CONNECTIONS_MAX = 1024  # of one ZMQ socket of the server …
ZMQ_CONNECTIONS_FRACTION = 1 / 8  # … and of the descriptors that the process may have …
ZMQ_CONNECTIONS_FRACTION_ALL = 1 / 2  # … where all ZMQ sockets together, four of a server, leave half to local workers
ZMQ_UNPROVEN_MAX = 256  # of these, connections that have not said hello; over it the oldest is shut down
# Where we speak ZMTP ourselves, which is wherever connections are not encrypted.
ZMTP_COMMAND_BYTES_MAX = 1024  # before the handshake is over: libzmq's takes less than 100
ZMTP_TOPIC_BYTES_MAX = 256  # of one subscription
ZMTP_TOPICS_MAX = 64  # subscriptions of one router: it has one or two
ZMTP_REQUESTS_MAX = 16  # of one router that are not answered yet; further ones are not read
TEND_S = 1.0  # pause between two looks at peers that hang in a handshake or an answer
ZMTP_STALLED_S = 30.0  # who reads nothing of an answer for so long is disconnected
# What libzmq keeps of messages that have not ended. In memory it is up to 2.3 times as much, if their parts are small.
ZMQ_UNFINISHED_BYTES_MAX = 4 << 20  # of one connection: four times what the library queues of whole messages
ZMQ_UNFINISHED_BYTES_ALL_MAX = 24 << 20  # of all connections of a socket
ZMQ_UNFINISHED_CHECK_S = 0.02  # in which a neighbour sends two of these limits, as fast as the library decrypts …
ZMQ_UNFINISHED_CHECK_S_EACH = 1e-4  # … but at most 4 % of the loop's time, at 4 µs a connection
ZMQ_COMMANDS_BYTES_A_S = 1024  # what heartbeats may take beside messages …
# … until the next message has ended: those of 8 minutes, and no more of all connections than they may leave unfinished.
ZMQ_COMMANDS_BYTES_MAX = 24 << 10
ZMQ_QUEUE_FRAMES = 16  # in the queues of the library, which counts frames; with 4, pipelined calls take twice the time
ZMQ_DESCRIPTORS = 16  # what one connection over ZMQ needs, plus a few: its library aborts when it runs out of them
HANDSHAKE_S_MAX = 60.0  # a handshake that hangs this long is abandoned and begun again: a frame may have been lost
# How long a closing client waits for copies of its other threads: any batch is copied by then.
CLOSE_TIMEOUT_S = 5.0
