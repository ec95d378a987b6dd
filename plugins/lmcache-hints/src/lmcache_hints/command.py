"""`lmcache-core hint`: send one action, or a whole envelope, to a running server."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from lmcache_core.cli import connecting
from lmcache_core.errors import UsageError

ACTIONS = ("fetch", "prefetch", "wait", "pin", "retain", "demote", "share", "release")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The action and its payload."""
    parser.add_argument("action", choices=[*ACTIONS, "send"], help="what to do; send: a whole envelope, from --file")
    parser.add_argument("--namespace", default="", help="label or id of the namespace of --key")
    parser.add_argument("--key", action="append", default=[], metavar="KEY", help="64 hexadecimal digits; repeatable")
    parser.add_argument("--session", default="", help="the session that this belongs to")
    parser.add_argument("--message-id", default="", help="ask what became of this message, or release it")
    parser.add_argument(
        "--payload", default="{}", metavar="JSON", help="more of the payload, such as '{\"ttl_s\": 60}'"
    )
    parser.add_argument("--file", type=Path, metavar="FILE", help="an envelope as JSON, for send; - for standard input")
    parser.add_argument("--json", action="store_true", help="print JSON")
    connecting.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if every action was accepted, clipped or deferred, else 1."""
    import msgspec

    from lmcache_core.cli.table import print_table
    from lmcache_hints.envelope import HintsReply, KvHintsEnvelope, Outcome
    from lmcache_hints.operation import OPERATION

    try:
        envelope = msgspec.convert(_envelope(arguments), KvHintsEnvelope)
    except msgspec.ValidationError as error:
        raise UsageError(f"this is no envelope of KV hints: {error}") from error
    with connecting.connect(arguments, "hint") as client:
        reply = client.call_operation(OPERATION, envelope, HintsReply)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(reply)).decode())
    else:
        rows = [
            (each.action_id, each.outcome, f"{each.done} of {each.objects}", each.reason) for each in reply.outcomes
        ]
        print(f"message {reply.message_id}")
        print_table(("action", "outcome", "objects", "why"), rows, right=(2,))
    refused = (Outcome.REJECTED, Outcome.MISSING)
    return 1 if any(each.outcome in refused for each in reply.outcomes) else 0


def _envelope(arguments: argparse.Namespace) -> Any:
    if arguments.action == "send":
        if arguments.file is None:
            raise UsageError("send needs --file: an envelope as JSON")
        text = sys.stdin.read() if str(arguments.file) == "-" else arguments.file.read_text()
        return _json("the envelope", text)
    payload = _json("--payload", arguments.payload)
    if not isinstance(payload, dict):
        raise UsageError("--payload is no JSON object")
    if arguments.session:
        payload["session"] = arguments.session
    if arguments.action == "release":
        if arguments.message_id:
            payload["message_id"] = arguments.message_id
    else:
        payload |= {"namespace": arguments.namespace} if arguments.namespace else {}
        payload |= {"keys": arguments.key} if arguments.key else {}
    known = arguments.message_id if arguments.action != "release" else ""
    return {
        "protocol_version": "0.1",
        "message_id": known or str(uuid4()),
        "actions": [
            {
                "action_id": arguments.action,
                "action_type": f"kv.{arguments.action}",
                "action_version": "1.0",
                "payload": payload,
            }
        ],
    }


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} is no JSON: {error}") from error
