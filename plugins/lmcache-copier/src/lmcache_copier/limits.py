"""Limits of the copier, each with its reason."""

from __future__ import annotations

ENGINES_MAX = 64  # connections at once: each has a thread
REGISTRATIONS_MAX = 1024  # of one engine: an engine has one, or one for each device
GROUPS_MAX = 256  # of one registration: each is compared with each
REGIONS_MAX = 8192  # of one registration: a few for each layer
ROWS_MAX_EACH = 1 << 18  # pages, or parts of large ones, of one object of each group: some 150 bytes each, and …
ROWS_MAX_TOTAL = 1 << 20  # … of all engines
MEASURED_BYTES_MAX = 256 << 20  # read to measure, by one call: it is made while the engine's other words wait
FILES_MAX_EACH = 256  # of an engine, mapped or on their way to be, a descriptor each, and …
FILES_MAX_TOTAL = 1024  # … of all engines, besides socket and pidfd
DESCRIPTORS_MAX = 64  # of one registration: what one message of the kernel carries is 253
JOBS_WAITING_MAX = 256  # of all engines: beyond that a job is refused
ENTRIES_MAX = 1 << 16  # of one job: a request has one for each group
ENTRY_BYTES = 256  # what one takes, besides its keys and ids
JOB_BYTES_MAX_EACH = 256 << 20  # of the keys and page ids of an engine's jobs, and of objects that are measured, and …
JOB_BYTES_MAX_TOTAL = 512 << 20  # … of all engines
JOB_THREADS = 8  # jobs at once: most of their time is spent waiting for the server or the memory
FRAME_BYTES_MAX = 64 << 20  # a batch of a million pages has 8 MiB of ids
CHUNK_BYTES = 512 << 10  # copied by one system call, and small enough that its checksum finds it in the cache
ROWS_MAX = 1023  # pages of one system call: the kernel takes 1,024, and one is the engine's mark
MARK_BYTES = 16  # proves that memory is that of the engine which registered it
ADDRESS_BITS = 56  # of any user's address
HANDLE_BYTES = 64  # of an allocation or an event of CUDA's
UUID_BYTES = 16  # of a GPU
OWED_BYTES_MAX = 16 << 20  # answers that an engine has not read yet: beyond that it is dropped
FIGURES_S = 1.0  # between two reports to the server

# Of an engine's side.
CONNECT_S = 1.0  # for the copier's welcome, and for the answer to a registration
QUIET_S = 1.0  # without a word while a job is under way: the copier is asked whether it lives …
ANSWER_S = 3.0  # … and has this long to say so
FENCE_S = 10.0  # for the end of a process that was killed: it may be inside a long copy
AUTO_BYTES = 16 << 20  # copied each way to choose one
AUTO_RATIO = 2.0  # server-driven may take so many times as long: the engine computes meanwhile
