"""Output of the sub-commands: tables, JSON, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import TYPE_CHECKING, Any

import click

from cdi_worker import errors, masking, units
from cdi_worker.importer import contract
from cdi_worker.importer import progress as progress_module
from cdi_worker.importer.commands import bar
from cdi_worker.importer.result import Result

if TYPE_CHECKING:
    from cdi_worker.importer.commands import parameters
    from cdi_worker.importer.inspection import Inspection
    from cdi_worker.importer.request import Request
    from cdi_worker.importer.send import file
    from cdi_worker.importer.verification import Verification

STYLES = ("auto", "bar", "lines", "json", "none")


@contextlib.contextmanager
def progress(style: str, obj: parameters.Context) -> Iterator[progress_module.Progress]:
    """Yield a progress that reports on standard error in ``style``, one of ``STYLES``."""
    if style == "auto":
        is_drawn_on = sys.stderr.isatty() and contract.environment().get("TERM", "dumb") != "dumb"
        style = "none" if obj.as_json else "bar" if is_drawn_on else "lines"
    if style == "none" or obj.quiet:
        yield progress_module.NullProgress()
    elif style == "bar":
        with bar.Bar(sys.stderr) as drawn:
            yield drawn
    else:
        # One format of lines, if there is a log.
        is_logged = obj.verbosity > 0 and style == "lines"
        lines = progress_module.Lines(sys.stderr, as_json=style == "json")
        with progress_module.Logged() if is_logged else lines as reporter:
            yield reporter


def say(text: str, *, err: bool = False) -> None:
    """Print to standard output, with ``err`` to standard error, where a failure is ignored.

    A pipe closed by its reader is ignored. Raises ``errors.Error`` if standard output is closed or full.
    """
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        pass
    except OSError as failure:
        if not err:
            raise errors.Error(reason=f"standard output: {errors.words(failure)}") from failure


@contextlib.contextmanager
def _complete(what: str) -> Iterator[None]:
    """If the block cannot print a result, report that ``what`` is complete nevertheless."""
    try:
        yield
    except errors.Error as err:
        say(f"cdi-worker: {err}; {what} is complete", err=True)


def as_json(fields: object, *, err: bool = False) -> None:
    """Print ``fields`` as one line of JSON."""
    say(json.dumps(masking.masked(fields)), err=err)


def result(done: Result, request: Request, obj: parameters.Context) -> None:
    """Print the result of an import."""
    digest = done.sha256 if request.read_back else ""
    with _complete(done.target):
        if obj.as_json:
            more = {"sha256": digest, "confirmed": done.confirmed} if digest else {}
            as_json({**done.as_fields(), **more}, err=obj.to_stdout)
            return
        if obj.quiet:
            if digest:
                # As sha256sum prints it.
                say(masking.mask(f"{digest}  {done.target}"), err=obj.to_stdout)
            return
        read, updated, seconds = _size(done.read), "", f"{done.seconds:.2f} s"
        if done.resumed:
            read += f", and {_size(done.resumed)} from an earlier attempt"
        if done.refetched:
            lost = _size(done.refetched)
            read += f"; {lost} of that attempt were no longer on storage and were fetched again"
        if done.changes is not None:
            compared, differed, written = map(units.format_size, dataclasses.astuple(done.changes))
            updated = f"{differed} of {compared} differed, {written} written"
        if done.read and not (digest or done.confirmed):
            seconds += f", {units.format_size(done.read / max(done.seconds, 1e-3))}/s read"
        is_blank = done.plan.route == "blank"
        source = {
            "imported": f"{done.source} -> {done.target}",
            "format": _format(done.format, done.compressions),
        }
        rows = {
            **({"created": done.target} if is_blank else source),
            "disk": _size(done.size),
            "read": "" if is_blank else read,
            "written": f"{_size(done.written)} of data" if done.written and not updated else "",
            "updated": updated,
            "layers": "; ".join(f"{name}: {units.format_size(count)}" for name, count in done.layers),
            "verified": ", ".join(starmap(_digest, done.verified.items())),
            "sha256": digest,
            "read back": f"{_size(done.confirmed)} are those received" if done.confirmed else "",
            "time": seconds,
            "route": f"{done.plan.route}: {done.plan.reason}",
            "labels": ", ".join(f"{name}={value}" for name, value in done.labels.items()),
        }
        _table(rows, err=obj.to_stdout)


def verification(found: Verification, obj: parameters.Context) -> None:
    """Print the result of a verification."""
    if obj.as_json:
        as_json(found.as_fields())
        return
    if obj.quiet:
        return
    seconds = max(found.seconds, 1e-3)
    # A blank source is not read, nor is a hole of the disk.
    ends = {"source": found.read, "disk": found.disk_read}
    speeds = [f", {end} {units.format_size(each / seconds)}/s" for end, each in ends.items() if each]
    rest = {
        "compared": "the rest of the file compared with zeros",
        "ignored": "the rest of the device not compared",
    }
    _table(
        {
            "equal" if found.is_equal else "DIFFERENT": f"{found.source} and {found.target}",
            "format": _format(found.survey.format, found.survey.compressions),
            "image": _size(found.size),
            "disk": _size(found.disk_size) + (f"; {rest[found.rest]}" if found.rest else ""),
            "compared": _size(found.compared),
            "difference": found.difference(),
            "read twice": ""
            if found.is_equal
            else "yes"
            if found.confirmed
            else "no, the source is a stream",
            "time": f"{found.seconds:.2f} s{''.join(speeds)}",
            "route": f"{found.plan.route}: {found.plan.reason}",
        }
    )
    for each in found.differences:
        zero = {"": "", "missing": f", the disk ends at {found.disk_size}"}.get(
            each.zero, f", zeros in the {each.zero}"
        )
        say(f"  {each.length} bytes at {each.offset}{zero}")
    if len(found.differences) < found.ranges:
        say("  …")


def uploaded(done: file.Sent, obj: parameters.Context) -> None:
    """Print the result of an upload."""
    resumed = f", of which the server had {_size(done.resumed)}" if done.resumed else ""
    with _complete("the upload"):
        if obj.as_json:
            as_json({**dataclasses.asdict(done), "seconds": round(done.seconds, 3)})
        elif not obj.quiet:
            _table(
                {
                    "uploaded": f"{done.path} -> {done.url}",
                    "size": f"{_size(done.size)}{resumed}",
                    "time": f"{done.seconds:.2f} s",
                }
            )


def inspection(found: Inspection, obj: parameters.Context) -> int:
    """Print the result of an inspection; return the exit status, which is the obstacle's if there is one."""
    facts, survey, plan = found.facts, found.survey, found.plan
    obstacle = "" if found.obstacle is None else found.obstacle.at_terminal()
    scratch, target = plan is not None and plan.scratch, found.target
    if obj.as_json:
        fields = {
            "source": found.source,
            "format": survey.format,
            "compression": list(survey.compressions),
            "virtualSize": survey.virtual_size,
            "sectorSize": survey.sector_size,
            "statedSize": found.stated_size,
            "volumeSize": found.volume_size,
            "overhead": float(found.overhead),
            "size": facts.size,
            "identity": facts.identity,
            "ranges": survey.ranges,
            "route": None if plan is None else str(plan.route),
            "reason": None if plan is None else plan.reason,
            "scratch": scratch,
            "target": None if target is None else target._asdict(),
            "obstacle": obstacle or None,
            **({} if found.obstacle is None else {"error": found.obstacle.as_fields(obstacle)}),
            **found.details,
        }
        as_json(fields)
    else:
        size, volume = _size(survey.virtual_size), "unknown"
        if found.stated_size is not None:
            size = f"{_size(found.stated_size)}, as {survey.compressions[0]} states"
        if found.volume_size is not None:
            volume = f"{_size(found.volume_size)} with {float(found.overhead):.1%} for the file system"
        rows = {
            "source": found.source,
            "format": _format(survey.format, survey.compressions),
            "virtual size": size,
            "sector size": "" if survey.sector_size is None else f"{survey.sector_size} bytes",
            "volume needed": volume,
            "size as served": _size(facts.size),
            "identity": facts.identity or "none: an interrupted import cannot be resumed",
            "byte ranges": "yes" if survey.ranges else "no",
            "route": "" if plan is None else f"{plan.route}: {plan.reason}",
            "scratch": "needed (--scratch DIRECTORY)" if scratch else "",
            "target": "" if target is None else str(target),
            "obstacle": obstacle,
        }
        # The names are those of JSON fields: checksumFile is checksum file.
        for name, value in found.details.items():
            if name != "chain":
                rows["".join(f" {each.lower()}" if each.isupper() else each for each in name)] = _readable(
                    value
                )
        layers: Any = found.details.get("chain", ())
        _table(rows | {f"layer {number}": _layer(each) for number, each in enumerate(layers, 1)})
    if found.obstacle is None:
        return 0
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        say(f"cdi-worker: {obstacle}", err=True)
    return found.obstacle.status


def _digest(of: str, digests: str) -> str:
    """Return verified digests for people, who compare the first digits."""
    parts = (each.partition(":") for each in digests.split(","))
    shown = " and ".join(f"{algorithm}:{digits[:12]}…" for algorithm, _, digits in parts)
    return f"{shown} of the {'file as served' if of == 'file' else of}"


def _layer(fields: Mapping[str, Any]) -> str:
    backing = fields["backingFile"]
    named = f"backing file {backing}" if backing is not None else "names no backing file"
    bitmaps = f", dirty bitmaps {', '.join(fields['bitmaps'])}" if fields["bitmaps"] else ""
    shown = f"{units.format_size(fields['bytes'])} of {units.format_size(fields['virtualSize'])}"
    return f"{fields['name']}: {shown} ({named}{bitmaps})"


def _table(rows: Mapping[str, object], *, err: bool = False) -> None:
    shown = {name: value for name, value in rows.items() if value not in {"", None}}
    width = max(map(len, shown))
    for name, value in shown.items():
        say(f"{name:>{width}}  {errors.one_line(str(value))}", err=err)


def _readable(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_readable(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        between = "; " if any(isinstance(item, Mapping) for item in value) else ", "
        return between.join(map(_readable, value))
    return str(value)


def _format(form: str, compressions: tuple[str, ...]) -> str:
    return " in ".join([form, *reversed(compressions)])


def _size(size: int | None) -> str:
    return "unknown" if size is None else units.format_exactly(size)
