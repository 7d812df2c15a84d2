"""The sub-command ``manifest``, which reads DataVolumes."""

from __future__ import annotations

import dataclasses
import logging
from fractions import Fraction
from typing import Any

import click

from cdi_worker import errors, version
from cdi_worker.importer import contract, request
from cdi_worker.importer.commands import command, output, parameters

log = logging.getLogger(__name__)

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


@click.command(
    cls=command.Command,
    example="cdi-worker manifest dv.yaml | kubectl apply -f -",
)
@click.argument("manifest")
@parameters.option(JOB, "--image", help="Container image of the worker [default: that of this release].")
@parameters.option(
    request.DISK,
    "--overhead",
    type=parameters.Typed("fraction", contract.parse_overhead),
    default="0.06",
    help="Fraction of a file system to leave free.",
)
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
    type=parameters.Whole(0),
    metavar="SECONDS",
    help="Delete a finished Job so long after its end, with its pods and their scratch [default: never].",
)
@parameters.option(
    request.SOURCE, "--after", default="", help="Checkpoint that an earlier Job has copied to the volume."
)
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
@parameters.option(
    request.SOURCE,
    "--secrets",
    type=parameters.FOLDER,
    help="Folder of Secrets and ConfigMaps for --contact: a sub-folder for each, a file for each key.",
)
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

    Also reads the dataVolumeTemplates of a VirtualMachine. Secrets and ConfigMaps are printed too.
    """
    # Help and completion load this module where the libraries of the extra are missing.
    from cdi_worker.importer.kubernetes import contact as contacts
    from cdi_worker.importer.kubernetes import datavolume, documents, pod
    from cdi_worker.importer.kubernetes import manifest as manifests

    parts = documents.read(manifest)
    volumes = datavolume.parse_all(datavolume.find(parts))
    settings = pod.Settings(image=image or version.image() or "", overhead=overhead, scratch=scratch, **given)
    pairs = [(each, settings) for each in volumes]
    objects = manifests.all_objects(pairs)
    if not settings.image and any(each["kind"] == "Job" for each in objects):
        raise errors.RequestError(NO_IMAGE)
    if contact and scratch is None:
        references = contacts.References(parts, secrets)
        for number, each in enumerate(volumes):
            scratch = contacts.needs_scratch(each, references, overhead, obj.cancel)
            pairs[number] = each, dataclasses.replace(settings, scratch=scratch)
        objects = manifests.all_objects(pairs)
    companions, warnings = manifests.companions(parts, volumes)
    for warning in warnings:
        log.warning("%s", warning)
    # Companions first, so that no pod waits for them.
    write = manifests.as_list if obj.as_json else manifests.dump
    output.say(write([*companions, *objects]).rstrip("\n"))
