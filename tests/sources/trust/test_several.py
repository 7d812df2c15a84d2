"""Demanded signatures of what consists of several parts: chains of images, and all disks of an OVA."""

from __future__ import annotations

from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import together
from cdi_worker.sources import trust
from tests.support import chains, containers, oracle, ovas, registries, signing

SIGNER = signing.Signer()
MIB = 1 << 20


def push(guarded: registries.Registry, name: str, data: bytes, *, signed: bool) -> cdi_worker.Location:
    """Push an image that holds a file, and return its address."""
    digest = guarded.push(name, containers.Image((containers.layer(*containers.disk(data), compression=""),)))
    if signed:
        signing.attach(guarded, name, digest, SIGNER.simple(digest, guarded.name(name)))
    return cdi_worker.Location(guarded.reference(name), guarded.access())


def demand(tmp_path: Path) -> trust.Demand:
    return trust.Demand(signed_by=SIGNER.write(tmp_path / "key.pem"))


@pytest.mark.parametrize("unsigned", [None, 0, 2])
def test_every_file_of_a_chain_must_be_signed(
    guarded: registries.Registry, tmp_path: Path, unsigned: int | None
) -> None:
    files = chains.Chain(tmp_path)
    files.base("8M", "write -P 1 0 2M")
    files.overlay("write -P 2 1M 64k")
    files.overlay("write -P 3 5M 64k")
    for path in files.files[1:]:
        files.unnamed(path)
    first, *layers = (
        push(guarded, f"chain-{unsigned}-{number}".lower(), path.read_bytes(), signed=number != unsigned)
        for number, path in enumerate(files.files)
    )
    target = tmp_path / "disk.img"
    wanted = cdi_worker.Request(
        source="registry",
        location=first,
        layers=tuple(layers),
        target=str(target),
        demand=demand(tmp_path),
    )
    if unsigned is None:
        # All were verified. What is in a layer is read in order, to compare its digest.
        with pytest.raises(errors.Unsupported, match="no byte ranges"):
            cdi_worker.run(wanted)
        return
    with pytest.raises(errors.Untrusted, match="not signed"):
        cdi_worker.run(wanted)
    oracle.unusable(target)


@pytest.mark.parametrize("signed", [True, False])
def test_all_disks_of_an_ova_are_imported_only_if_it_is_signed(
    guarded: registries.Registry, tmp_path: Path, *, signed: bool
) -> None:
    disks = [ovas.Disk(bytes([number]) * MIB, f"{number}.raw") for number in (1, 2)]
    location = push(guarded, f"ova-{signed}".lower(), ovas.ova(*disks), signed=signed)
    folder = tmp_path / "disks"
    folder.mkdir()
    wanted = cdi_worker.Request(
        source="registry", location=location, target=str(folder), demand=demand(tmp_path)
    )
    if signed:
        results = together.run_all(wanted)
        assert [len(result.signatures) for result in results] == [1, 1]
        assert sorted(path.read_bytes()[:1] for path in folder.iterdir()) == [b"\1", b"\2"]
        return
    with pytest.raises(errors.Untrusted, match="not signed"):
        together.run_all(wanted)
    assert not [*folder.iterdir()]
