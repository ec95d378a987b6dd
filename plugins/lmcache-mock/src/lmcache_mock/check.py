"""What `lmcache-core check` says about a mock tier's faults, and whether its control file can be used."""

from __future__ import annotations

import os

from lmcache_core.errors import TierError, UsageError
from lmcache_core.plugins.components import Finding
from lmcache_mock.control import read_rules
from lmcache_mock.settings import MockSettings


def check_faults(name: str, settings: MockSettings) -> Finding:
    """Can the initial rules be parsed, and can a control file be created at its path? Raises `TierError`."""
    rules: list[str] = list(settings.faults)
    if settings.control is not None:
        if not os.access(settings.control.parent, os.R_OK | os.X_OK):
            cure = f"make the folder, or move l2.{name}.control"
            raise TierError(f"{settings.control.parent} cannot be read", cure=cure)
        try:
            rules = [str(rule) for rule in read_rules(settings.control)] if settings.control.exists() else rules
        except UsageError as error:
            raise TierError(str(error), cure="correct the line, or delete the file") from error
    message = f"faults in force: {'; '.join(rules)}" if rules else "no faults in force"
    return Finding(True, "", f"objects live in the server's memory and go with it; {message}")
