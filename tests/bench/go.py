"""CDI's Go importer as one more side, for those who have its binary.

``CDI_GO_WORKER`` names a directory with ``cdi-importer``. The paths of its contract are absolute, so it runs
in a root directory of its own, made of bind mounts in a mount namespace; that takes about 30 ms and counts as
its time.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.bench.bench import Bench, Side
from tests.bench.measure import Cost

#: The directory of CDI's own binaries (cdi-importer), for those who have them.
PROGRAMS = "CDI_GO_WORKER"
#: Arguments: the root, the directories of data and scratch, the binaries, the block device or "", the
#: command.
_ENTER = """
root=$1 data=$2 scratch=$3 programs=$4 block=$5; shift 5
mount -t tmpfs tmpfs "$root"
cd "$root"
mkdir dev data scratch go
for path in bin sbin lib lib64 usr etc proc sys tmp var; do
    [ ! -d /$path ] || { mkdir $path; mount --rbind /$path $path; }
done
for path in null zero random urandom; do touch dev/$path; mount --bind /dev/$path dev/$path; done
[ -z "$block" ] || { touch dev/cdi-block-volume; mount --bind "$block" dev/cdi-block-volume; }
mount --bind "$data" data
mount --bind "$scratch" scratch
mount --bind "$programs" go
exec chroot . "$@"
"""


def importer(bench: Bench, kind: str, endpoint: str, **env: str) -> Side | None:
    """Return a side that imports with CDI's Go worker, or None without one. ``env``: of its contract."""
    programs = os.environ.get(PROGRAMS)
    if programs is None:
        return None
    given = {
        "IMPORTER_SOURCE": "http",
        "IMPORTER_ENDPOINT": endpoint,
        "IMPORTER_CONTENTTYPE": "kubevirt",
        "IMPORTER_IMAGE_SIZE": str(bench.setting.size),
        "FILESYSTEM_OVERHEAD": "0",
        "PREALLOCATION": "false",
        "OWNER_UID": "bench",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        **env,
    }
    place = bench.file.with_name("go")
    block = str(bench.block) if kind == "block" else ""

    def run() -> Cost:
        shutil.rmtree(place, ignore_errors=True)
        folders = [place / name for name in ("root", "data", "scratch")]
        for folder in folders:
            folder.mkdir(parents=True)
        enter: list[str | Path] = [
            "unshare",
            "--mount",
            "sh",
            "-euc",
            _ENTER,
            "sh",
            *folders,
            programs,
            block,
        ]
        settings_ = [f"{name}={value}" for name, value in given.items()]
        try:
            return bench.run([*enter, "env", "-i", *settings_, "/go/cdi-importer", "-v=1"])
        finally:
            shutil.rmtree(place)

    return run
