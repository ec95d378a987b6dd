"""`lmcache-core size`: how many bytes a model's KV takes, and how large a pool and a tier it needs; or, of a running
server, what a pool of another size would have given."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_core.cli import connecting
from lmcache_core.cli.table import print_table
from lmcache_core.errors import UsageError
from lmcache_core.observe.readable import duration, size
from lmcache_core.textfiles import read_text_file
from lmcache_core.tiers.object.format import HEADER_BYTES
from lmcache_tools.kv_of_model import ITEM_BYTES, count

_TEXT_PARTS = ("text_config", "llm_config", "language_config")  # of multimodal models


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    model = parser.add_argument_group("the model", "its config.json, or its figures, which override the file")
    model.add_argument("--model", metavar="FILE", help="the model's config.json, or the folder that contains it")
    model.add_argument("--layers", type=_count, metavar="N", help="layers that keep KV")
    model.add_argument("--kv-heads", type=_count, metavar="N")
    model.add_argument("--head-size", type=_count, metavar="N")
    model.add_argument(
        "--dtype", choices=sorted(ITEM_BYTES), help="dtype of the KV (default: the model's own, or bfloat16)"
    )
    model.add_argument(
        "--chunk-tokens", type=_count, default=256, metavar="N", help="tokens in one chunk (default: %(default)s)"
    )
    model.add_argument("--kv-shards", type=_count, default=1, metavar="N", help="ranks that split a chunk's KV")
    traffic = parser.add_argument_group("the traffic")
    traffic.add_argument("--new-tokens", type=_figure, metavar="N", help="prompt tokens per second that are not hits")
    traffic.add_argument(
        "--l1-seconds",
        type=_figure,
        default=60.0,
        metavar="S",
        help="time within which the pool serves reuse (default: 60)",
    )
    traffic.add_argument(
        "--tier-seconds",
        type=_figure,
        default=3600.0,
        metavar="S",
        help="time within which the tier serves reuse (default: 3600)",
    )
    traffic.add_argument(
        "--serde",
        type=_figure,
        default=1.0,
        metavar="RATIO",
        help="size on the tier ÷ size in the pool; 0.5 for fp8 (default: 1)",
    )
    traffic.add_argument("--prompt-tokens", type=_count, metavar="N", help="length of a prompt to load from the tier")
    traffic.add_argument(
        "--line", type=_figure, default=10.0, metavar="GBIT", help="network speed to the tier, in Gbit/s (default: 10)"
    )
    live = parser.add_argument_group("a running server")
    live.add_argument(
        "--from-live",
        action="store_true",
        help="ask a server with l1.eviction.type = adaptive what other sizes of its pool would have given",
    )
    connecting.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")


def run(arguments: argparse.Namespace) -> int:
    """Print; returns 0. Raises UsageError if the model is not known well enough."""
    if arguments.from_live:
        return _run_live(arguments)
    config = config_of(Path(arguments.model)) if arguments.model else {}
    given = {"layers": arguments.layers, "kv_heads": arguments.kv_heads, "head_size": arguments.head_size}
    counted = count(config, {name: each for name, each in given.items() if each}, arguments.dtype)
    figures = plan(counted.token_bytes, arguments) | {"upper_bound_why": counted.bound_why or None}
    if arguments.json:
        print(json.dumps(figures))
        return 0
    print_table(("what", "how much"), described(figures, arguments))
    if counted.bound_why:
        print(f"an upper bound: {counted.bound_why}")
    return 0


def _run_live(arguments: argparse.Namespace) -> int:
    with connecting.connect(arguments, "size") as client:
        figures = from_live(client.status())
    if arguments.json:
        print(json.dumps(figures))
        return 0
    rows = [
        (size(row["l1_bytes"]), row["order"], f"{row['hit_share']:.1%}", f"{100 * row['gain']:+.1f} points")
        for row in figures["pools"]
    ]
    sampled = f"{figures['sampled_uses']:,} sampled uses, 1 key in {figures['sampled_one_in']}"
    title = f"{sampled}; gain over {figures['order']} now"
    print_table(("a pool of", "in the order", "hits of uses", "gain"), rows, title=title, right=(2, 3))
    return 0


def from_live(status: Mapping[str, Any]) -> dict[str, Any]:
    """What the shadow caches of a server's policy say, in bytes and shares. `gain`: over the order that it follows now.
    Raises UsageError if its policy has none, or has seen nothing yet."""
    l1 = status["l1"]
    found = l1.get("policy", {})
    if "lru_hit_share_by_size" not in found:
        raise UsageError(
            f"the server's eviction policy {l1['eviction_policy']} has no shadow caches",
            cure='set l1.eviction.type = "adaptive"',
        )
    if not found["sampled_uses"]:
        raise UsageError("the server has not seen a use of a sampled key yet", cure="ask again when it has traffic")
    now = found["hit_share"][found["order"]]
    shares = [(1.0, order, share) for order, share in found["hit_share"].items()]
    shares += [(float(times), "lru", share) for times, share in found["lru_hit_share_by_size"].items()]
    pools = [
        {"l1_bytes": round(times * l1["pool_bytes"]), "order": order, "hit_share": share, "gain": round(share - now, 4)}
        for times, order, share in sorted(shares)
    ]
    return {name: found[name] for name in ("order", "sampled_uses", "sampled_one_in")} | {"pools": pools}


def config_of(path: Path) -> dict[str, Any]:
    """A model's `config.json`; of a multimodal one, the part about text."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(read_text_file(file))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; give --layers, --kv-heads, --head-size") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} does not contain a JSON object: is it a model's config.json?")
    inner: dict[str, Any] = next((found[name] for name in _TEXT_PARTS if isinstance(found.get(name), dict)), {})
    return {**found, **inner}


def plan(token_bytes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures, in bytes and seconds; None if the traffic is not given."""
    object_bytes = -(-token_bytes * arguments.chunk_tokens // arguments.kv_shards)
    on_tier_bytes = round(object_bytes * arguments.serde) + HEADER_BYTES
    # Growth of a token on the tier: each object has a header.
    tier_token_bytes = on_tier_bytes * arguments.kv_shards / arguments.chunk_tokens
    new, prompt = arguments.new_tokens, arguments.prompt_tokens
    return {
        "token_bytes": token_bytes,
        "object_bytes": object_bytes,
        "object_on_tier_bytes": on_tier_bytes,
        "l1_bytes": None if new is None else round(new * arguments.l1_seconds * token_bytes),
        "tier_bytes": None if new is None else round(new * arguments.tier_seconds * tier_token_bytes),
        "prompt_bytes": None if prompt is None else round(prompt * tier_token_bytes),
        "prompt_line_s": None if prompt is None else prompt * tier_token_bytes * 8 / (arguments.line * 1e9),
    }


def described(figures: Mapping[str, Any], arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The figures as text."""
    an_object = f"one object: {arguments.chunk_tokens} tokens, 1 of {arguments.kv_shards} shards"
    rows = [
        ("a token", size(figures["token_bytes"])),
        (an_object, size(figures["object_bytes"])),
        ("the same on a tier, with its header", size(figures["object_on_tier_bytes"])),
    ]
    if figures["l1_bytes"] is not None:
        rows.append((f"pools, for reuse within {duration(arguments.l1_seconds)}", size(figures["l1_bytes"])))
        rows.append((f"tier, for reuse within {duration(arguments.tier_seconds)}", size(figures["tier_bytes"])))
    if figures["prompt_bytes"] is not None:
        taken = f"{size(figures['prompt_bytes'])}, {figures['prompt_line_s']:.1f} s at {arguments.line:g} Gbit/s"
        rows.append((f"{arguments.prompt_tokens:,} tokens from the tier", taken))
    return rows


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return number


def _figure(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number
