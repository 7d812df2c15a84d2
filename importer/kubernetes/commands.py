"""The sub-commands ``manifest`` and ``run``, which read a DataVolume's manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from cdi_worker import errors
from cdi_worker.importer import contract, inspection
from cdi_worker.importer.commands import command, options, output, parameters, signatures
from cdi_worker.importer.settings import Room, Settings

if TYPE_CHECKING:
    from cdi_worker.importer import request
    from cdi_worker.importer.kubernetes import datavolume, documents

log = logging.getLogger(__name__)

#: Sources whose need for scratch depends on their data.
UNKNOWN_SCRATCH = frozenset({"http", "s3", "gcs", "registry"})
NO_IMAGE = (
    "the Job needs a container image, and this version was released without one; "
    "build one (make image), push it, and name it: --image registry.example.org/cdi-worker:VERSION"
)
#: Characters of a label's value in Kubernetes.
LABEL = 63
#: A section of the help.
JOB = "Job"


def _parse_queue(text: str) -> str:
    from cdi_worker.importer.kubernetes import documents

    if not documents.NAME.fullmatch(text) or len(text) > LABEL:
        raise errors.RequestError(
            f"{text!r} is not the name of a LocalQueue: lower-case letters, digits, - and ., at most {LABEL}"
        )
    return text


_overhead = parameters.option(
    options.DISK,
    "--overhead",
    type=options.FRACTION,
    default="0.06",
    help="Fraction of a file system to leave free.",
)
_secrets = parameters.option(
    options.SOURCE,
    "--secrets",
    type=options.FOLDER,
    help="Folder of Secrets and ConfigMaps: a sub-folder for each, a file for each key.",
)
_after = parameters.option(
    options.SOURCE, "--after", default="", help="Checkpoint that an earlier run has copied to the volume."
)


@click.command(
    cls=command.Command,
    example="cdi-worker manifest dv.yaml | kubectl apply -f -",
    short_help="Print DataVolumes as Kubernetes objects.",
)
@click.argument("manifest")
@parameters.option(JOB, "--image", help="Container image of the worker [default: that of this release].")
@_overhead
@parameters.option(
    JOB,
    "--scratch/--no-scratch",
    "scratch",
    here=True,
    default=None,
    help="Whether the pod gets scratch space [default: if it may be needed].",
)
@parameters.option(
    JOB, "--scratch-class", empty=True, help="Storage class of scratch space [default: the DataVolume's]."
)
@parameters.option(
    JOB, "--suspend", is_flag=True, help="Create the Job suspended; start it later with kubectl patch."
)
@parameters.option(
    JOB,
    "--queue",
    type=parameters.Typed("name", _parse_queue),
    help="Kueue's LocalQueue, which starts the Jobs [default: the DataVolume's label "
    "kueue.x-k8s.io/queue-name].",
)
@parameters.option(
    JOB,
    "--ttl",
    type=click.IntRange(0),
    metavar="SECONDS",
    help="Delete a finished Job so long after its end, with its pods and their scratch [default: never].",
)
@_after
@parameters.option(
    JOB,
    "--verify",
    is_flag=True,
    here=True,
    help="Compare the disks on the claims, instead of importing them.",
)
@parameters.option(
    JOB, "--contact", is_flag=True, help="Contact the source to find out whether it needs scratch space."
)
@_secrets
@click.pass_obj
def manifest(
    obj: parameters.Context,
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
    """Print the DataVolumes in MANIFEST (a YAML file, - for standard input) as plain Kubernetes objects.

    Secrets and ConfigMaps in the same file are printed, too.
    """
    from cdi_worker import version
    from cdi_worker.importer.kubernetes import datavolume, documents, pod
    from cdi_worker.importer.kubernetes import manifest as datavolume_manifest

    parts = documents.read(manifest)
    manifests = datavolume.find_all(parts)
    volumes = datavolume.parse_all(manifests)
    settings = pod.Settings(image=image or version.image() or "", overhead=overhead, scratch=scratch, **given)
    each_settings = [settings] * len(volumes)
    objects = datavolume_manifest.all_objects(volumes, each_settings)
    if not settings.image and any(each["kind"] == "Job" for each in objects):
        raise errors.RequestError(NO_IMAGE)
    if contact and scratch is None:
        for index, (document, volume) in enumerate(zip(manifests, volumes, strict=True)):
            # Only this DataVolume, with the Secrets and ConfigMaps of all.
            own = [each for each in parts if each.kind != "DataVolume" or each is document]
            needed = _contacted(obj, own, volume, secrets, overhead)
            each_settings[index] = dataclasses.replace(settings, scratch=needed)
        objects = datavolume_manifest.all_objects(volumes, each_settings)
    companions, warnings = datavolume_manifest.companions(parts, volumes)
    for warning in warnings:
        log.warning("%s", warning)
    # Companions first, so that no pod waits for them.
    write = datavolume_manifest.as_list if obj.as_json else datavolume_manifest.dump
    output.say(write([*companions, *objects]).rstrip("\n"))


def _contacted(
    obj: parameters.Context,
    found: list[documents.Document],
    volume: datavolume.DataVolume,
    secrets: str | None,
    overhead: Fraction,
) -> bool | None:
    """Return whether the source's data needs scratch; None if that does not depend on its data."""
    if volume.source.kind not in UNKNOWN_SCRATCH or volume.is_archive:
        return None
    settings = Settings(room=Room(overhead=overhead))
    with _planned(found, secrets, settings, {"target": ""}) as (_, stages):
        return _needs_scratch(inspection.inspect(stages[0], obj.cancel))


def _needs_scratch(facts: inspection.Inspection) -> bool:
    if facts.plan is None:
        raise facts.obstacle or errors.RequestError(f"{facts.source}: no route")
    return facts.plan.scratch or facts.plan.spill


@click.command(
    cls=command.MountCommand,
    example="cdi-worker run dv.yaml --target disk.img",
    short_help="Import a DataVolume on this machine.",
)
@click.argument("manifest")
@parameters.option(
    options.WRITING,
    "--target",
    default="",
    type=options.TARGET,
    help="File, directory or block device to write.",
)
@parameters.option(options.SOURCE, "--from", "origin", default="", help="File to upload, or volume to clone.")
@_secrets
@_after
@_overhead
@options.scratch_option
@options.direct_option
@options.force_option
@options.update_option
@options.wait_option
@options.connections_option
@parameters.stall(options.TRANSFER, "a byte")
@options.speed_option
@parameters.added(*signatures.options(signatures.SIGNATURE))
@parameters.option(
    options.OUTPUT,
    "--dry-run",
    is_flag=True,
    here=True,
    help="Check the request, contact the source and print the plan; write nothing.",
)
@options.report_file_option
@options.progress_option
@click.pass_obj
def run(obj: parameters.Context, /, manifest: str, secrets: str | None, style: str, **given: Any) -> int:
    """Import the DataVolume in MANIFEST (a YAML file, - for standard input) on this machine.

    Prints the phases and conditions that the DataVolume would have in a cluster.
    """
    from cdi_worker.importer.kubernetes import documents
    from cdi_worker.importer.kubernetes import run as datavolume_run

    if not given["dry_run"] and not given["target"]:
        raise errors.RequestError("no target given: name a file, directory or device with --target")
    if given["report"] == "-":
        raise errors.RequestError("--report -: standard output gets the phases; name a file")
    settings = parameters.settings(given)
    place = {name: given[name] for name in ("target", "origin", "after")}
    place["mounts"] = parameters.given(click.get_current_context())
    found = documents.read(manifest)
    with _planned(found, secrets, settings, place) as (volume, stages):
        if given["dry_run"]:
            if settings.report:
                log.warning(options.NO_REPORT)
            return output.inspection(inspection.inspect(stages[0], obj.cancel), obj)
        write = output.silent if obj.quiet and not obj.as_json else output.say
        status = datavolume_run.Status(volume.name, volume.source.kind, write, as_json=obj.as_json)
        with output.progress(style, obj) as reporter:
            datavolume_run.run(volume, stages, status, reporter, obj.cancel)
    return 0


@contextlib.contextmanager
def _planned(
    found: list[documents.Document], secrets: str | None, settings: Settings, place: Mapping[str, Any]
) -> Iterator[tuple[datavolume.DataVolume, list[request.Request]]]:
    """Yield the one DataVolume and its stages; their temporary files are deleted after the block.

    Raises ``RequestError`` that lists all faults and missing values of the manifest.
    """
    from cdi_worker.images.tools import workspace
    from cdi_worker.importer.kubernetes import datavolume, references
    from cdi_worker.importer.kubernetes import run as datavolume_run

    faults: list[str] = []
    with workspace.Workspace() as folder:
        volume = datavolume.parse(datavolume.find(found), faults)
        where = datavolume_run.Place(folder=folder, **place)
        keys = references.References(found, secrets)
        planner = datavolume_run.Planner(volume, keys, where, settings, contract.environment(), faults)
        stages = planner.requests()
        if faults:
            raise errors.RequestError(*faults)
        yield volume, stages
