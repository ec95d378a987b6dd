"""`lmcache-core mock`: change the faults of a mock tier while its server runs."""

# a command prints

from __future__ import annotations

import argparse
from pathlib import Path

from lmcache_core.errors import UsageError
from lmcache_mock.control import read_rules, write_rules
from lmcache_mock.drills.faults import OPERATIONS, Fault, FaultRule


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.description = (
        "Write the control file of a mock tier (its setting `control`). A rule is 'OPERATION FAULT [rate=R] [skip=N] "
        f"[count=N] [s=SECONDS]'. Operations: {', '.join(OPERATIONS)}. Faults: {', '.join(Fault)}. "
        "Without rules: show those in the file."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the control file")
    parser.add_argument("rules", nargs="*", metavar="RULE", help="for example 'any hang', 'load flipped_bits rate=0.1'")
    parser.add_argument("--heal", action="store_true", help="remove all rules")
    parser.add_argument("--add", action="store_true", help="keep the existing rules")


def run(arguments: argparse.Namespace) -> int:
    """Write and print the rules; returns 0. Raises UsageError for an invalid rule, and for contradicting options."""
    if arguments.heal and (arguments.rules or arguments.add):
        raise UsageError("--heal removes all rules: give it alone")
    if arguments.add and not arguments.rules:
        raise UsageError("--add has nothing to add: give rules")
    rules = read_rules(arguments.file) if arguments.add or not (arguments.rules or arguments.heal) else []
    if arguments.rules or arguments.heal:
        rules += [FaultRule.parse(text) for text in arguments.rules]
        write_rules(arguments.file, rules)
    for rule in rules:
        print(rule)
    if not rules:
        print(f"{arguments.file}: no faults")
    return 0
