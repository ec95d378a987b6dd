"""One table and the processes of `multiprocessing`, forked or spawned: python processes.py fork|spawn|forkserver

A forked child inherits the handle. A spawned one gets it as an argument: what is pickled is the path, and the child
attaches to that table, and to no other.
"""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

from lmcache_l0 import SharedCache


def work(cache: SharedCache, number: int) -> None:
    """Read what the parent wrote, and answer in the table."""
    question = cache.get(key=f"question {number}")
    cache.set(key=f"answer {number}", value=question.upper() + b" from %d" % os.getpid())


def main(method: str, folder: str) -> list[str]:
    """Ask two processes, and return their answers."""
    context = multiprocessing.get_context(method)
    with SharedCache(Path(folder) / "t.l0", hash_slots=1000, max_value_size=256) as cache:
        cache.set_many({f"question {i}": b"hello" for i in range(2)})
        workers = [context.Process(target=work, args=(cache, i)) for i in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        answers = [cache[f"answer {i}"].decode() for i in range(2)]
        cache.unlink()
    return answers


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write("\n".join(main(sys.argv[1] if len(sys.argv) > 1 else "spawn", folder)) + "\n")
