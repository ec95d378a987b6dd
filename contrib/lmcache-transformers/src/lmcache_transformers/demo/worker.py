"""One worker process of the demo: reads its job as JSON from the command line, says what it did in one JSON line.

`python -m lmcache_transformers.demo.worker JOB`, where JOB is an object of the fields of `Job`.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

from lmcache_transformers.demo.job import Job

BY_TRANSFORMERS, BY_NUMPY = "lmcache_transformers.demo.llama_tasks", "lmcache_transformers.demo.numpy_tasks"


def work(job: Job) -> None:
    """Do it and say what came of it."""
    tasks = import_module(BY_NUMPY if job.model == "none" else BY_TRANSFORMERS)
    if job.task == "hang":
        with tasks.hold(job) as found:
            _say(found)
            # Only a kill ends this, or the end of the demo, which closes the pipe.
            sys.stdin.buffer.read()
    elif job.task == "generate":
        _say(tasks.generate(job))
    else:
        _say(tasks.uncached(job))


def _say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    work(Job(**json.loads(sys.argv[1])))
