"""The sub-commands ``manifest`` and ``run``, which read a DataVolume's manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from cdi_worker import contract, errors, execute
from cdi_worker.commands import late, options, output
from cdi_worker.images.tools import process

if TYPE_CHECKING:
    from cdi_worker import request
    from cdi_worker.commands import group
    from cdi_worker.kubernetes import datavolume, documents

log = logging.getLogger(__name__)

#: Sources whose need for scratch depends on their data.
UNKNOWN_SCRATCH = frozenset({"http", "s3", "gcs", "registry"})
NO_IMAGE = (
    "the Job needs a container image, and this version was released without one; "
    "build one (make image), push it, and name it: --image registry.example.org/cdi-worker:VERSION"
)
FOLDER = click.Path(exists=True, file_okay=False)

_overhead = click.option(
    "--overhead",
    type=options.FRACTION,
    default="0.06",
    show_default=True,
    help="Fraction of a file system to leave free.",
)
_secrets = click.option(
    "--secrets",
    type=FOLDER,
    help="Folder of Secrets and ConfigMaps: a sub-folder for each, a file for each key.",
)
_after = click.option("--after", default="", help="Checkpoint that an earlier run has copied to the volume.")


@click.command()
@click.argument("manifest")
@click.option("--image", help="Container image of the worker [default: that of this release].")
@_overhead
@click.option(
    "--scratch/--no-scratch",
    "scratch",
    default=None,
    help="Whether the pod gets scratch space [default: if it may be needed].",
)
@click.option("--scratch-class", help="Storage class of scratch space [default: the DataVolume's].")
@click.option("--suspend", is_flag=True, help="Create the Job suspended; start it later with kubectl patch.")
@click.option(
    "--ttl",
    type=click.IntRange(0),
    help="Seconds after which a finished Job is deleted, with its pods and their scratch space "
    "[default: kept].",
)
@_after
@click.option(
    "--contact", is_flag=True, help="Contact the source to find out whether it needs scratch space."
)
@_secrets
@click.pass_obj
def manifest(
    obj: group.Context,
    /,
    manifest: str,
    overhead: Fraction,
    scratch: bool | None,
    *,
    image: str | None,
    contact: bool,
    secrets: str | None,
    **given: Any,
) -> None:
    """Print the DataVolume in MANIFEST (a YAML file, - for standard input) as plain Kubernetes objects.

    cdi-worker manifest dv.yaml | kubectl apply -f -

    Secrets and ConfigMaps in the same file are printed, too.
    """
    from cdi_worker import version
    from cdi_worker.kubernetes import datavolume, documents, pod
    from cdi_worker.kubernetes import manifest as datavolume_manifest

    found = documents.read(manifest)
    faults: list[str] = []
    volume = datavolume.parse(datavolume.find(found), faults)
    if faults:
        raise errors.RequestError(*faults)
    settings = pod.Settings(image=image or version.image() or "", overhead=overhead, scratch=scratch, **given)
    made = datavolume_manifest.objects(volume, settings)
    if not settings.image and any(each["kind"] == "Job" for each in made):
        raise errors.RequestError(NO_IMAGE)
    if contact and scratch is None and volume.source.kind in UNKNOWN_SCRATCH and not volume.is_archive:
        with _planned(found, secrets, {"target": "", "overhead": overhead}) as (_, stages):
            needed = _needs_scratch(execute.inspect(stages[0], obj.cancel))
        made = datavolume_manifest.objects(volume, dataclasses.replace(settings, scratch=needed))
    beside, warnings = datavolume_manifest.companions(found, volume)
    for warning in warnings:
        log.warning("%s", warning)
    # First, so that no pod waits for them.
    output.say(datavolume_manifest.dump([*beside, *made]).rstrip("\n"))


def _needs_scratch(inspection: execute.Inspection) -> bool:
    if inspection.plan is None:
        raise inspection.obstacle or errors.RequestError(f"{inspection.source}: no route")
    return inspection.plan.scratch or inspection.plan.spill


@click.command(cls=late.MountCommand)
@click.argument("manifest")
@click.option("--target", default="", type=click.Path(), help="File, directory or block device to write.")
@click.option("--from", "origin", default="", help="File to upload, or volume to clone.")
@_secrets
@click.option("--scratch", type=FOLDER, help="Folder for images that cannot be streamed.")
@_overhead
@_after
@click.option("--direct", is_flag=True, help="Bypass the page cache (O_DIRECT).")
@options.force_option
@options.wait_option
@click.option("--connections", type=click.IntRange(1, 64), default=6, show_default=True)
@options.stall_option("a byte")
@click.option(
    "--dry-run", is_flag=True, help="Check the request, contact the source and print the plan; write nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--progress", "style", type=click.Choice(output.STYLES), default="auto", show_default=True)
@click.pass_obj
def run(obj: group.Context, /, manifest: str, secrets: str | None, style: str, **given: Any) -> int:
    """Import the DataVolume in MANIFEST (a YAML file, - for standard input) on this machine.

    Prints the phases and conditions that the DataVolume would have in a cluster.
    """
    from cdi_worker.kubernetes import documents
    from cdi_worker.kubernetes import run as datavolume_run

    dry, as_json = given.pop("dry_run"), given.pop("as_json")
    if not dry and not given["target"]:
        raise errors.RequestError("no target given: name a file, directory or device with --target")
    given["mounts"] = late.given(click.get_current_context())
    with _planned(documents.read(manifest), secrets, given) as (volume, stages):
        if dry:
            return output.inspection(execute.inspect(stages[0], obj.cancel), stages[0], as_json=as_json)
        status = datavolume_run.Status(volume.name, volume.source.kind, output.say, as_json=as_json)
        with output.progress(style, as_json=as_json) as reporter:
            datavolume_run.run(volume, stages, status, reporter, obj.cancel)
    return 0


@contextlib.contextmanager
def _planned(
    found: list[documents.Document], secrets: str | None, given: Mapping[str, Any]
) -> Iterator[tuple[datavolume.DataVolume, list[request.Request]]]:
    """Yield the one DataVolume and its stages; their temporary files are deleted after the block.

    Raises ``RequestError`` that lists all faults and missing values of the manifest.
    """
    from cdi_worker.kubernetes import datavolume, keyring
    from cdi_worker.kubernetes import run as datavolume_run

    faults: list[str] = []
    with process.workspace() as folder:
        volume = datavolume.parse(datavolume.find(found), faults)
        settings = datavolume_run.Settings(folder=folder, **given)
        keys = keyring.Keyring(found, secrets)
        stages = datavolume_run.Planner(volume, keys, settings, contract.environment(), faults).requests()
        if faults:
            raise errors.RequestError(*faults)
        yield volume, stages
