"""What `lmcache-core check` says about a mock tier, and whether its control file can be used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lmcache_core.errors import UsageError
from lmcache_core.plugins.components import Finding
from lmcache_mock.control import read_rules
from lmcache_mock.settings import MockSettings

if TYPE_CHECKING:
    from lmcache_core.settings.model import Settings


def check_tiers(settings: Settings) -> list[Finding]:
    """A finding for every tier of type mock."""
    found = []
    for name, tier in settings.l2.items():
        if isinstance(tier.settings, MockSettings):
            found.append(check_tier(name, tier.settings))
    return found


def check_tier(name: str, settings: MockSettings) -> Finding:
    """Can the initial rules be parsed, and can a control file be created at its path?"""
    subject = f"tier {name!r} (mock)"
    rules: list[str] = list(settings.faults)
    if settings.control is not None:
        if not os.access(settings.control.parent, os.R_OK | os.X_OK):
            return Finding(
                False,
                subject,
                f"{settings.control.parent} cannot be read",
                f"make the folder, or move l2.{name}.control",
            )
        try:
            rules = [str(rule) for rule in read_rules(settings.control)] if settings.control.exists() else rules
        except UsageError as error:
            return Finding.of_error(subject, error, "correct the line, or delete the file")
    said = f"faults in force: {'; '.join(rules)}" if rules else "no faults in force"
    return Finding(True, subject, f"objects live in the server's memory and go with it; {said}")
