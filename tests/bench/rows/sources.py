"""Registries and object stores."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from tests.bench import bench as benches
from tests.bench import go, inputs
from tests.bench.bench import Bench, Sides, Verdict, Work
from tests.bench.measure import Cost
from tests.bench.rows import disks
from tests.support import containers, objectservers, registries

MIB = 1 << 20


@benches.row(
    "c.qcow2 in a layer", rival="the slowest of download, gunzip and `qemu-img convert`, each alone", aim=1.15
)
def registry(bench: Bench) -> Iterator[Sides]:
    """Measure a compressed qcow2 image in a layer against the slowest stage by itself."""
    packed, image = (bench.form(name) for name in ("c.qcow2.layer", "c.qcow2"))
    layer = containers.Blob(packed.read_bytes(), "application/vnd.oci.image.layer.v1.tar+gzip")
    with registries.registry(bench.directory / "registry") as served:
        served.push("disk", containers.Image((layer,)))
        stages = (
            f"curl -sf {served.url}/v2/disk/blobs/{layer.digest} -o /dev/null",
            f"{sys.executable} -m isal.igzip -dc {packed} > /dev/null",
            disks.CONVERT.format(flags="", form="qcow2", file=image, target=bench.file),
        )
        download, gunzip, convert = (bench.shell(command, bench.file) for command in stages)
        reference = served.reference("disk")
        yield Sides(
            bench.imports(reference, bench.file, "--insecure"),
            convert,
            (download, gunzip),
            go=go.importer(bench, "file", reference, IMPORTER_SOURCE="registry", INSECURE_TLS="true"),
            work=Work(packed.stat().st_size, bench.setting.data, "c.qcow2"),
            verdict=_slowest,
        )


def _slowest(costs: Sequence[Cost]) -> Verdict:
    ours, *stages = costs
    return ours.wall / max(stage.wall for stage in stages), ""


@benches.row(
    "raw from S3 against http",
    rival="cdi-worker itself, over HTTP with a presigned URL (256 MiB of data)",
    aim=1.1,
    pod=False,
)
def s3(bench: Bench) -> Iterator[Sides]:
    """Measure a raw disk by signed S3 requests against the same object by plain HTTP."""
    path = inputs.noise(bench.directory, 256 * MIB)
    with inputs.folder(bench.directory, "seaweed") as own, objectservers.seaweed(own) as store:
        secret = own / "secret"
        secret.write_text(objectservers.SECRET_KEY)
        client = store.client()
        client.upload_file(str(path), objectservers.BUCKET, path.name)
        object_ = {"Bucket": objectservers.BUCKET, "Key": path.name}
        presigned = client.generate_presigned_url("get_object", object_)
        keys = ("--source", "s3", "--user", objectservers.ACCESS_KEY, "--password-file", str(secret))
        yield Sides(
            bench.imports(store.url(path.name), bench.file, *keys),
            bench.imports(presigned, bench.file),
            work=Work(256 * MIB, 256 * MIB),
        )
