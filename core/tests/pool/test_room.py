"""How much memory is there: control groups of both versions, mounts, and words that help."""

from __future__ import annotations

import errno
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from lmcache_core.errors import NotEnoughMemoryError
from lmcache_core.pool.backing import Backing, segment_path
from lmcache_core.pool.room import LimitedBy, Room, check_room, control_groups, room
from lmcache_core.pool.segment import Segment

MIB = 1 << 20
GIB = 1 << 30
Tree = Callable[[dict[str, str]], Path]

MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugePages_Free: 10\nHugePages_Rsvd: 4\n"
V2_MOUNT = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "30 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "31 23 0:28 / /sys/fs/cgroup/memory rw shared:5 master:2 - cgroup cgroup rw,memory\n"
)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A root directory with the files given; /proc/meminfo comes by itself."""

    def plant(files: dict[str, str]) -> Path:
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return plant


def test_every_ancestor_of_a_version_2_group_counts(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "0::/pod/container/inner\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.current": "1\n",  # the root group has no limit file
            "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/pod/container/memory.current": f"{GIB // 2}\n",
            "sys/fs/cgroup/pod/container/inner/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/inner/memory.current": "7\n",
        }
    )
    assert list(control_groups(root)) == [
        ("/sys/fs/cgroup/pod/container", 2 * GIB, GIB // 2),
        ("/sys/fs/cgroup/pod", 4 * GIB, 3 * GIB),
    ]
    found = room(Backing.MEMFD, root=root)
    assert found.limited_by is LimitedBy.CONTROL_GROUP
    assert found.where == "control group /sys/fs/cgroup/pod"
    assert 0.8 * GIB < found.available_bytes < GIB, "the reserve is left to others"
    assert set(found.figures) == {
        "the machine",
        "control group /sys/fs/cgroup/pod",
        "control group /sys/fs/cgroup/pod/container",
    }


def test_every_ancestor_of_a_version_1_group_counts(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "5:cpu:/\n4:hugetlb,memory:/docker/abc\n0::/\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
            "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/docker/memory.usage_in_bytes": f"{GIB // 2}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{GIB // 2}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{GIB // 4}\n",
        }
    )
    assert list(control_groups(root)) == [
        ("/sys/fs/cgroup/memory/docker/abc", GIB // 2, GIB // 4),
        ("/sys/fs/cgroup/memory/docker", GIB, GIB // 2),
    ]


def test_a_container_that_sees_only_its_own_subtree_finds_its_limit(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "4:memory:/docker/abc/sub\n",
            "proc/self/mountinfo": "31 23 0:28 /docker/abc /sys/fs/cgroup/mem\\040ory ro - cgroup none rw,memory\n",
            "sys/fs/cgroup/mem ory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/mem ory/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/mem ory/sub/memory.limit_in_bytes": f"{GIB // 2}\n",
            "sys/fs/cgroup/mem ory/sub/memory.usage_in_bytes": "0\n",
        }
    )
    assert [limit for _, limit, _ in control_groups(root)] == [GIB // 2, GIB]


@pytest.mark.parametrize("path", ["/../../other", "/elsewhere"])
def test_a_group_outside_the_mount_falls_back_to_what_is_seen(tree: Tree, path: str) -> None:
    root = tree(
        {
            "proc/self/cgroup": f"0::{path}\n",
            "proc/self/mountinfo": V2_MOUNT.replace(" / /sys", " /mine /sys") if "else" in path else V2_MOUNT,
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        }
    )
    assert list(control_groups(root)) == [("/sys/fs/cgroup", GIB, 0)]


def test_inactive_page_cache_does_not_count_as_used(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/a/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/a/memory.high": f"{GIB // 2}\n",
            "sys/fs/cgroup/a/memory.current": f"{GIB // 4}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB // 8}\nactive_file 9\n",
        }
    )
    assert list(control_groups(root)) == [("/sys/fs/cgroup/a", GIB // 2, GIB // 8)]


def test_without_control_groups_the_machine_decides(tree: Tree) -> None:
    found = room(Backing.MEMFD, root=tree({}))
    assert found.limited_by is LimitedBy.MACHINE
    assert 7.8 * GIB < found.available_bytes < 8 * GIB


def test_huge_pages_are_counted_by_themselves(tree: Tree) -> None:
    found = room(Backing.HUGETLB, root=tree({}))
    assert found.available_bytes == 6 * 2 * MIB
    with pytest.raises(NotEnoughMemoryError, match=r"vm.nr_hugepages=512 "):
        check_room(GIB, found)


def test_a_small_dev_shm_is_refused_with_figures_and_cures(
    small_mount: Callable[[int], Path], pool_name: str, runtime_dir: Path
) -> None:
    mount = small_mount(64)
    with pytest.raises(NotEnoughMemoryError) as refused:
        Segment.create(pool_name, 8 * GIB, runtime_dir=runtime_dir, shm_dir=mount)
    message = str(refused.value)
    for part in (str(mount), "0.06 GiB free", "8.27 GiB", "--shm-size=10g", "emptyDir.medium: Memory", '"memfd"'):
        assert part in message


def test_what_fits_to_the_byte_is_accepted() -> None:
    found = Room(GIB, LimitedBy.MOUNT, "/dev/shm")
    check_room(GIB, found)
    with pytest.raises(NotEnoughMemoryError):
        check_room(GIB + 1, found)


# --- a real control group -----------------------------------------------------------------------------------


def removed(group: Path) -> bool:
    """The kernel may call a group busy for a moment after its last process has been waited for."""
    try:
        group.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


@pytest.fixture
def small_group(eventually: Callable[[Callable[[], bool]], None]) -> Iterator[Path]:
    """A control group of this machine with a limit of 64 MiB: its directory."""
    name = f"lmcache-test-{uuid.uuid4().hex[:8]}"
    for parent, limit in [
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ]:
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(64 * MIB))
        except OSError:
            group.rmdir()
            continue
        yield group
        eventually(partial(removed, group))
        return
    pytest.skip("no memory control group can be made here")


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_control_group_that_is_too_small_is_an_error_and_no_kill(
    small_group: Path, pool_name: str, runtime_dir: Path, backing: str
) -> None:
    script = """
import os, sys
from functools import partial
from pathlib import Path
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from lmcache_core.errors import NotEnoughMemoryError
from lmcache_core.pool.segment import Segment
try:
    Segment.create(sys.argv[2], 256 << 20, sys.argv[3], runtime_dir=Path(sys.argv[4]))
except NotEnoughMemoryError as error:
    print(error)
"""
    arguments = [str(small_group), pool_name, backing, str(runtime_dir)]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"control group {small_group}" in done.stdout
    assert "memory limit" in done.stdout
    assert not segment_path(pool_name).exists()
    assert not list(runtime_dir.iterdir())
