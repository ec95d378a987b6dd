"""`lmcache-core serve`: run a server until SIGTERM."""

from __future__ import annotations

import argparse
import logging
import resource
import sys

from lmcache_core.cli.compose import add_settings_options, composed, print_settings_help

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options other than settings."""
    add_settings_options(parser)
    parser.add_argument(
        "--keep-pool",
        action="store_const",
        const=("--l1.keep_pool", "true"),
        default=(),
        help="keep the pool for the next server at a clean shutdown (l1.keep_pool)",
    )
    parser.add_argument("--record", metavar="DIR", help="record requests into this directory, for `trace`")
    parser.add_argument(
        "--log-format",
        default="text",
        choices=["text", "json"],
        help="json: one object for each line (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"], help="default: %(default)s"
    )


def _begin_log(arguments: argparse.Namespace) -> None:
    """Log to standard error."""
    from lmcache_core.observe.lines import JsonLines
    from lmcache_core.observe.log_thread import LogThread, TextLines

    handler = LogThread(sys.stderr.fileno(), JsonLines() if arguments.log_format == "json" else TextLines())
    logging.basicConfig(level=arguments.log_level.upper(), handlers=[handler])


def _record(arguments: argparse.Namespace) -> tuple[str, ...]:
    return () if arguments.record is None else ("--operations.record.dir", arguments.record)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the end; returns the exit status. Prints one line once clients can connect."""
    if arguments.help:
        print_settings_help(arguments)
        return 0
    _begin_log(arguments)
    arguments.setting_flags = [*arguments.setting_flags, *arguments.keep_pool, *_record(arguments)]
    settings = composed(arguments, log.warning).settings
    for refusal in arguments.registry.refused:
        if not refusal.chosen:
            log.warning("plugin not in use: %s", refusal)
    from lmcache_core.server.process.end_signals import EndSignals
    from lmcache_core.server.server import Server

    # A session takes two or three descriptors. The usual soft limit of 1,024 exists for select(), which we do not use.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with EndSignals() as signals:
        server = Server(settings, arguments.registry)

        def ready(address: str) -> None:
            had, all_of_it = server.parts.populator.populated_bytes, server.parts.segment.info.data_bytes
            populated = f"{had:,} of {all_of_it:,} bytes populated"
            print(f"lmcache-core {settings.name} ready at {address}, {populated}", flush=True)

        status: int = server.run(ready, signals)
        signals.finish()
    return status
