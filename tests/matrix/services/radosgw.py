"""Ceph RADOS Gateway: one monitor, one OSD in memory, one gateway, all on loopback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

from services.moto import ACCESS_KEY, SECRET_KEY, S3Service
from services.service import Daemon, ServiceError, find_binary, free_port, wait_healthy

CURE = "apt-get install --no-install-recommends ceph-mon ceph-osd radosgw"
PROGRAMS = ("monmaptool", "ceph-authtool", "ceph-mon", "ceph-osd", "ceph", "radosgw", "radosgw-admin")
STORE_BYTES = 3 << 30
COMMAND_S = 60.0

# Chunks, stripes and windows of 32 MiB: with the defaults the tails of overwritten objects stay in memory.
CONFIG = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}/0]
mon initial members = a
ms bind ipv6 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
crash dir = {folder}
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {store_bytes}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd max object size = 134217728
osd max write size = 256
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon data avail crit = 1
mon data avail warn = 1
mon max pg per osd = 1000
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw max chunk size = 33554432
rgw obj stripe size = 33554432
rgw put obj min window size = 33554432
rgw get obj window size = 33554432
rgw get obj max req size = 33554432
rgw gc obj min wait = 1
rgw gc processor period = 2
rgw gc processor max time = 2
rgw gc max objs = 3
rgw enable usage log = false
rgw enable ops log = false
rgw run sync thread = false
rgw thread pool size = 32
debug ms = 0
"""


class RadosGateway(S3Service):
    name = "s3-radosgw"
    restartable: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path()
        self._daemons: list[Daemon] = []
        self._gateway: Daemon | None = None
        self._programs: dict[str, str] = {}

    def start(self, folder: Path) -> None:
        self._programs = {name: find_binary(name, CURE) for name in PROGRAMS}
        self._folder = folder
        port, mon_port, fsid = free_port(), free_port(), str(uuid4())
        self.endpoint = f"http://127.0.0.1:{port}"
        text = CONFIG.format(fsid=fsid, mon_port=mon_port, port=port, folder=folder, store_bytes=STORE_BYTES)
        (folder / "ceph.conf").write_text(text)
        for name in ("mon", "osd"):
            (folder / name).mkdir()
        self._make_keys()
        self._start_monitor(fsid, mon_port)
        self._start_osd()
        self._start_gateway()
        self._make_user()
        self.make_bucket()

    def healthy(self) -> bool:
        return self._gateway is not None and self._gateway.running and self.answers()

    def stop(self) -> None:
        for daemon in (self._gateway, *reversed(self._daemons)):
            if daemon is not None:
                daemon.kill()  # nothing in it outlives the test
        self._daemons, self._gateway = [], None

    def kill(self) -> None:
        """The gateway only: the store behind it keeps what it has."""
        assert self._gateway is not None
        self._gateway.kill()

    def restart(self) -> None:
        self._start_gateway()

    def secrets(self) -> Sequence[str]:
        return (SECRET_KEY,)

    # --- keys, beside the one of `adapter_settings` ---------------------------------------------------------
    def make_key(self, access_key: str, secret_key: str) -> None:
        words = ("--uid", "matrix", "--key-type", "s3", "--access-key", access_key, "--secret", secret_key)
        self._run("radosgw-admin", "-n", "client.rgw", "key", "create", *words)

    def remove_key(self, access_key: str) -> None:
        self._run("radosgw-admin", "-n", "client.rgw", "key", "rm", "--uid", "matrix", "--access-key", access_key)

    # --- one after the other ------------------------------------------------------------------------------
    def _make_keys(self) -> None:
        keyring = str(self._folder / "keyring")
        everything = ("mon", "allow *", "osd", "allow *", "mgr", "allow *")
        owners = {
            "mon.": everything[:2],
            "client.admin": everything,
            "client.rgw": ("mon", "allow rw", "osd", "allow rwx"),
        }
        owners["osd.0"] = ("mon", "allow profile osd", "osd", "allow *")
        for number, (owner, caps) in enumerate(owners.items()):
            flags = [word for kind, what in zip(caps[::2], caps[1::2], strict=True) for word in ("--cap", kind, what)]
            create = ["--create-keyring"] if number == 0 else []
            self._run("ceph-authtool", *create, keyring, "--gen-key", "-n", owner, *flags)

    def _start_monitor(self, fsid: str, port: int) -> None:
        monmap = str(self._folder / "monmap")
        self._run("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{port}]", "--fsid", fsid, monmap)
        keyring = str(self._folder / "keyring")
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        monitor = self._daemon("ceph-mon", "-f", "-i", "a")
        wait_healthy("ceph-mon", lambda: self._try("ceph", "--connect-timeout", "2", "-s"), monitor)
        # A whole keyring at mkfs gives the monitor the keys of mon. and admin; the others are told.
        self._run("ceph", "auth", "import", "-i", keyring)

    def _start_osd(self) -> None:
        identity = str(uuid4())
        number = self._run("ceph", "osd", "new", identity).strip()
        self._run("ceph-osd", "-i", number, "--mkfs", "--osd-uuid", identity)
        osd = self._daemon("ceph-osd", "-f", "-i", number)

        def up() -> bool:
            return int(json.loads(self._run("ceph", "osd", "stat", "-f", "json"))["num_up_osds"]) == 1

        wait_healthy("ceph-osd", up, osd)

    def _start_gateway(self) -> None:
        self._gateway = Daemon(
            [self._programs["radosgw"], "-c", self._config, "-f", "-n", "client.rgw"], self._folder / "gateway.out"
        )
        wait_healthy("radosgw", self.answers, self._gateway)

    def _make_user(self) -> None:
        words = ("--uid", "matrix", "--display-name", "matrix", "--access-key", ACCESS_KEY, "--secret", SECRET_KEY)
        self._run("radosgw-admin", "-n", "client.rgw", "user", "create", *words)

    # --- programs -----------------------------------------------------------------------------------------
    @property
    def _config(self) -> str:
        return str(self._folder / "ceph.conf")

    def _daemon(self, program: str, *arguments: str) -> Daemon:
        log = self._folder / f"{program}.out"
        daemon = Daemon([self._programs[program], "-c", self._config, *arguments], log)
        self._daemons.append(daemon)
        return daemon

    def _run(self, program: str, *arguments: str) -> str:
        config = () if program in ("monmaptool", "ceph-authtool") else ("-c", self._config)
        argv = [self._programs[program], *config, *arguments]
        env = {**os.environ, "CEPH_CONF": self._config, "CEPH_ARGS": ""}
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S, env=env, check=False)
        except subprocess.TimeoutExpired as error:
            raise ServiceError(f"{program} did not end within {COMMAND_S:.0f} s") from error
        if done.returncode:
            raise ServiceError(f"{program} {arguments[0]} failed: {done.stderr[-1000:]}")
        return done.stdout

    def _try(self, program: str, *arguments: str) -> bool:
        try:
            self._run(program, *arguments)
        except ServiceError:
            return False
        return True
