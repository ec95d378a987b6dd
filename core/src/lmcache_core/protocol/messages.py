"""Every message of the protocol: tagged, versioned MessagePack arrays in which unknown fields are refused.

A request carries `rid`, chosen by the client; its reply carries it back, and replies come in any order. Keys travel as
one blob of n × 32 bytes. Replies are positional: one status byte and one u64 offset for each key. Pickle is never used,
and nothing in a message is executed or looked up by name.
"""

from __future__ import annotations

# Used as `from lmcache_core.protocol import messages as m`: both halves of the protocol under one name.
from lmcache_core.protocol.replies import *  # noqa: F403
from lmcache_core.protocol.requests import *  # noqa: F403

PROTOCOL_VERSION_MIN = 2  # 1 had the options of a lookup among its fields
PROTOCOL_VERSION_MAX = 2
