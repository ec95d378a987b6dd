"""Every limit of hints, with its reason."""

from __future__ import annotations

ID_CHARS_MAX = 256  # a UUID has 36; names of sessions and tools are short
ACTIONS_MAX = 64  # an envelope travels with each request, in one frame
KEYS_MAX = 8_192  # of one action: 128k tokens in blocks of 16
TOKENS_MAX = 1 << 20  # the longest contexts
DEADLINE_S_MAX = 600.0
DELAY_S_MAX = 3_600.0
TTL_S_MAX = 86_400.0
ACTIONS_REMEMBERED = 16_384  # with their messages' ids: a router that repeats one does so within seconds
LOOK_S = 1.0  # until the next look for messages to forget, where the last one found too few
SESSIONS_REMEMBERED = 4_096
JOBS_WAITING_MAX = 4_096
KEYS_WAITING_MAX = 262_144  # of all of these: 20 MB
LOADERS = 4  # loads at once; requests go first
PINNED_MAX = 16_384  # objects, once for each message that pins them: each term costs the loop 10 ms
RETAINED_MAX = 16_384  # objects, once for each message that retains them: each second they cost the loop 10 ms
PIN_TERM_S = 10.0  # pins are renewed, and what nobody renews expires: the server's pins know no holder
RENEW_S = 2.5
TOUCH_S = 1.0  # how often what is retained counts as used
DELAYS_KEPT = 128  # of each class of sessions
CLASSES_KEPT = 256
DELAYS_NEEDED = 8  # before a class is trusted; until then everything is loaded at once
KEEP_S = 60.0  # what a wait has loaded, while its class is not known
MOST = 0.9  # of a class: whoever stays away longer than they do is kept for no longer than anybody else
MARGIN_S = 0.25  # before the shortest delay seen, besides the time of the load
LOAD_KEYS = 64  # in one call
RETRY_S = 0.25  # before a load looks again for room, and a share at what is on its way; doubles up to …
RETRY_S_MAX = 8.0
CALL_S = 10.0
