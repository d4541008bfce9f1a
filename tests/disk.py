"""Disks that are full and folders that are read-only, for real.

A small file system of its own (tmpfs) can be filled to the last byte, without any harm to others; making one takes
root and the right to mount.  Where that is not given, the kernel's limit on the size of a process's files stands in: a
block that goes beyond it fails after its first bytes, as on a full disk; files that have their size already do not.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SIZE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_FILE_LIMIT_BYTES = 8192


class SmallDisk:
    def __init__(self, folder: Path, *, mounted: bool) -> None:
        self.folder = folder
        self.mounted = mounted
        self._ballast = folder / "ballast"

    def fill(self, pid: int) -> None:
        """From now on the process finds no room for anything but some kilobytes."""
        if not self.mounted:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FILE_LIMIT_BYTES, resource.RLIM_INFINITY))
            return
        with self._ballast.open("wb", buffering=0) as file:
            size = _CHUNK_BYTES
            while size:
                try:
                    if file.write(bytes(size)) < size:
                        size //= 2
                except OSError:
                    size //= 2

    def free(self, pid: int) -> None:
        if self.mounted:
            self._ballast.unlink()
        else:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE_BYTES},mode=0700", "pgtide-test", str(folder)]
    mounted = bool(shutil.which("mount")) and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(folder, mounted=mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_read_only(folder: Path, *, read_only: bool) -> None:
    """Nothing can be created, removed or renamed below `folder`; files that are open can still be written."""
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        path.chmod(0o500 if read_only else 0o700)


def heeding_permissions(command: list[str]) -> list[str]:
    """The command, run such that permissions count for it also when we are root."""
    if os.geteuid():
        return command
    # PR_CAPBSET_DROP (24) of CAP_DAC_OVERRIDE (1): root is then an owner like any other.
    drop = "assert not ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)"
    program = f"import ctypes, os, sys; {drop}; os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", program, *command]
