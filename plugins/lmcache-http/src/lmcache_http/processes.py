"""The `process_*` metrics of the server and of its helpers, under the names that every exporter uses, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric as Family


def process_families(figures: Mapping[str, Any]) -> Iterable[Family]:
    """None unless the server is this process's parent: in another pid namespace its numbers are other processes'."""
    server = figures["server"]["pid"]
    if server != os.getppid():
        return ()
    pids = {name: row["pid"] for name, row in figures["helpers"].items() if row["pid"] is not None} | {"server": server}
    found: dict[str, Family] = {}
    for process, pid in pids.items():
        for one in ProcessCollector(pid=partial(int, pid), registry=None).collect():
            family = found.setdefault(one.name, Family(one.name, one.documentation, one.type))
            for sample in one.samples:
                family.add_sample(sample.name, {"process": process}, sample.value)
    return found.values()
