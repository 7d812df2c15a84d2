"""The sub-commands that take a DataVolume's manifest."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from importer import errors, options

if TYPE_CHECKING:
    from importer import datavolume

_overhead = click.option(
    "--overhead",
    type=options.FRACTION,
    default="0.06",
    show_default=True,
    help="Part of a file system to leave free.",
)
_after = click.option("--after", default="", help="Checkpoint that an earlier run has brought to the volume.")


@click.command()
@click.argument("manifest")
@click.option("--image", default="cdi-worker", show_default=True, help="Image of the worker.")
@_overhead
@click.option(
    "--scratch/--no-scratch",
    "scratch",
    default=None,
    help="Whether the pod gets scratch space [default: unless none can be needed].",
)
@click.option("--scratch-class", help="Storage class of scratch [default: the DataVolume's].")
@click.option("--suspend", is_flag=True, help="Create the Job suspended, to be started when it may run.")
@_after
def manifest(manifest: str, overhead: Fraction, scratch: bool | None, **given: Any) -> None:
    """Print the DataVolume in MANIFEST (a YAML file, - for standard input) as plain Kubernetes objects.

    cdi-worker manifest dv.yaml | kubectl apply -f -
    """
    from importer import datavolume_manifest, datavolume_pod

    volume = _read(manifest)
    settings = datavolume_pod.Settings(overhead=overhead, scratch=scratch, **given)
    click.echo(datavolume_manifest.dump(datavolume_manifest.objects(volume, settings)), nl=False)


def _read(path: str) -> datavolume.DataVolume:
    """Return the DataVolume of a file. Raises ``RequestError`` with all its faults."""
    from importer import datavolume, documents

    faults: list[str] = []
    volume = datavolume.parse(datavolume.find(documents.read(path)), faults)
    if faults:
        raise errors.RequestError(*faults)
    return volume
