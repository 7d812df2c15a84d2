"""A full image with its increments, and a disk that is updated in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.bench import bench as benches
from tests.bench.bench import Bench, Sides, Work
from tests.support import processes, worker

MIB = 1 << 20


def increments(bench: Bench) -> list[Path]:
    """Return a full image and two increments of 64 MiB each, made once."""
    paths = [bench.form("qcow2")]
    for number in (1, 2):
        path = paths[0].with_suffix(f".{number}.qcow2")
        if not path.exists():
            below, growing = paths[-1].name, path.with_suffix(".part")
            create = ("qemu-img", "create", "-q", "-f", "qcow2", "-b", below, "-F", "qcow2", growing)
            processes.run(*create)
            write = f"write -q -P {number} {number * 96}M 64M"
            processes.run("qemu-io", "-f", "qcow2", "-c", write, growing)
            growing.rename(path)
        paths.append(path)
    return paths


@benches.row("qcow2 and two increments", rival="`curl` of each, then `qemu-img convert`", aim=0.6)
def chain(bench: Bench) -> Iterator[Sides]:
    """Measure a chain against downloads of its files into one folder, and a conversion of the last."""
    full, *layers = increments(bench)
    folder = bench.file.with_name("chain")
    paths = (full, *layers)
    gets = " && ".join(f"curl -sf {bench.web.url(path)} -o {path.name}" for path in paths)
    convert = f"qemu-img convert -m 16 -W -f qcow2 -O raw {layers[-1].name} {bench.file}"
    options = [f"--layer={bench.web.url(path)}" for path in layers]
    data = bench.setting.data + 128 * MIB
    yield Sides(
        bench.imports(bench.web.url(full), bench.file, *options),
        bench.shell(
            f"mkdir -p {folder} && cd {folder} && {gets} && {convert} && sync -d {bench.file}", bench.file
        ),
        work=Work(data, data),
    )


@benches.row("raw, updated without a change", target="block", rival="`curl`, `dd`", aim=0.8)
def update(bench: Bench) -> Iterator[Sides]:
    """Measure an update of a device that holds the disk already against writing it again."""
    url = bench.web.url(bench.raw)
    command = [*worker.COMMAND, "import", "--update", "--progress", "none", url, bench.block]
    write = f"curl -sf {url} | dd bs=1M iflag=fullblock conv=fsync status=none of={bench.block}"
    bench.shell(write, bench.block)()
    yield Sides(
        bench.command(command, bench.block),
        bench.shell(write, bench.block),
        work=Work(bench.raw.stat().st_size, 0),
    )
