"""Registries, object stores and NBD."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench import bench as benches
from tests.bench import go, inputs
from tests.bench.bench import Bench, Sides
from tests.bench.rows import disks
from tests.support import containers, nbd_exports, objectservers, registries

MIB = 1 << 20


@benches.row("c.qcow2 in a container image", rival="curl | tar -xz; qemu-img convert -m 16 -W")
def registry(bench: Bench) -> Iterator[Sides]:
    """Measure a compressed qcow2 image in a layer against a download of the layer that is unpacked."""
    packed = bench.form("c.qcow2.layer")
    layer = containers.Blob(packed.read_bytes(), "application/vnd.oci.image.layer.v1.tar+gzip")
    with registries.registry(bench.directory / "registry") as served:
        served.push("disk", containers.Image((layer,)))
        reference, blob = served.reference("disk"), f"{served.url}/v2/disk/blobs/{layer.digest}"
        convert = disks.CONVERT.format(flags="", form="qcow2", file=bench.temporary, target=bench.file)
        yield Sides(
            bench.imports(reference, bench.file, "--insecure"),
            bench.shell(f"curl -sf {blob} | tar -xzO > {bench.temporary} && {convert}", bench.file),
            go.importer(bench, "file", reference, IMPORTER_SOURCE="registry", INSECURE_TLS="true"),
        )


@benches.row("256 MiB of raw data from S3", rival="curl of a presigned URL")
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
            bench.shell(f"curl -sf '{presigned}' -o {bench.file} && sync -d {bench.file}", bench.file),
        )


@benches.row("1 GiB of raw data over NBD", rival="nbdcopy")
def nbd(bench: Bench) -> Iterator[Sides]:
    """Measure an export of nbdkit."""
    path = inputs.noise(bench.directory, 1024 * MIB)
    with inputs.folder(bench.directory, "nbd") as own, nbd_exports.nbdkit(own, "-r", "file", path) as port:
        url = f"nbd://127.0.0.1:{port}/"
        copy = f"truncate -s {path.stat().st_size} {bench.file} && nbdcopy --flush {url} {bench.file}"
        yield Sides(bench.imports(url, bench.file), bench.shell(copy, bench.file))
