"""Output of the sub-commands: tables, JSON, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from cdi_worker import errors, masking, units
from cdi_worker.importer import contract
from cdi_worker.importer import progress as progress_module
from cdi_worker.importer.commands import words
from cdi_worker.importer.result import Result

if TYPE_CHECKING:
    from cdi_worker.formats import bmap
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
        style = "none" if obj.as_json else "bar" if _is_drawn_on() else "lines"
    if style == "none" or obj.quiet:
        yield progress_module.NullProgress()
    elif style == "bar":
        # Imported when used (start-up time).
        from cdi_worker.importer.commands import bar

        with bar.Bar(sys.stderr) as drawn:
            yield drawn
    else:
        with progress_module.Lines(sys.stderr, as_json=style == "json") as lines:
            yield lines


def _is_drawn_on() -> bool:
    return sys.stderr.isatty() and contract.environment().get("TERM", "dumb") != "dumb"


def say(text: str, *, err: bool = False) -> None:
    """Print to standard output, with ``err`` to standard error, where a failure is ignored.

    A reader that has closed its end has seen enough: what was done is done. Raises ``errors.Error`` if
    standard output is closed or full.
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
    """Print in the block what was done: it stays done if that cannot be printed."""
    try:
        yield
    except errors.Error as err:
        say(f"cdi-worker: {err}; {what} is complete", err=True)


def as_json(fields: object, *, err: bool = False) -> None:
    """Print ``fields`` as one line of JSON."""
    say(json.dumps(masking.masked(fields)), err=err)


def silent(_text: str) -> None:
    """Print nothing."""


def value(obj: parameters.Context, name: str, text: str, **more: str) -> None:
    """Print a result that is one value: alone, or as the field ``name``."""
    if obj.as_json:
        as_json({**more, name: text})
    else:
        say(masking.mask(text))


def result(done: Result, request: Request, obj: parameters.Context) -> None:
    """Print the result of an import."""
    digest = done.sha256 if request.read_back else ""
    with _complete(done.target):
        if obj.as_json:
            more = {"sha256": digest, "confirmed": done.confirmed} if digest else {}
            as_json({**done.as_fields(), **more}, err=obj.to_stdout)
        elif not obj.quiet:
            _imported(done, obj, digest)
        elif digest:
            # As sha256sum prints it.
            say(masking.mask(f"{digest}  {done.target}"), err=obj.to_stdout)


def _imported(done: Result, obj: parameters.Context, digest: str) -> None:
    if done.plan.route == "blank":
        rows = {"created": done.target, "disk": _size(done.size), "time": f"{done.seconds:.2f} s"}
        _table({**rows, "route": f"{done.plan.route}: {done.plan.reason}"}, err=obj.to_stdout)
        return
    rate = units.format_size(done.read / max(done.seconds, 1e-3))
    _table(
        {
            "imported": f"{done.source} -> {done.target}",
            "format": _format(done.format, done.compressions),
            "disk": _size(done.size),
            "read": _read(done),
            "updated": _updated(done),
            "layers": "; ".join(f"{name}: {units.format_size(count)}" for name, count in done.layers),
            "sha256": digest,
            "map": _mapped(done.map) if done.map else "",
            "read back": f"{_size(done.confirmed)} are those received" if done.confirmed else "",
            "time": f"{done.seconds:.2f} s"
            + (f", {rate}/s read" if done.read and not (digest or done.confirmed) else ""),
            "route": f"{done.plan.route}: {done.plan.reason}",
            "labels": ", ".join(f"{name}={value}" for name, value in done.labels.items()),
        },
        err=obj.to_stdout,
    )


def map_of(disk: str, path: str, found: bmap.Map, obj: parameters.Context) -> None:
    """Print what was mapped."""
    if obj.as_json:
        fields = {"map": path, "ranges": len(found.ranges), "bytes": found.mapped}
        as_json({"target": disk, "size": found.size, **fields}, err=obj.to_stdout)
    elif not obj.quiet:
        rows = {"mapped": f"{disk} -> {path}", "disk": _size(found.size), "data": _mapped(found)}
        _table(rows, err=obj.to_stdout)


def _mapped(found: bmap.Map) -> str:
    count = len(found.ranges)
    return f"{_size(found.mapped)} in {count} range{'s' if count != 1 else ''}"


def verification(found: Verification, obj: parameters.Context) -> None:
    """Print the result of a verification."""
    if obj.as_json:
        as_json(found.as_fields())
        return
    if obj.quiet:
        return
    seconds = max(found.seconds, 1e-3)
    # A map is not a source that is read, nor is a hole of the disk.
    ends = {"source": found.read, "disk": found.disk_read}
    speeds = [f", {end} {units.format_size(each / seconds)}/s" for end, each in ends.items() if each]
    rest = {
        "compared": "the rest of the file compared with zeros",
        "ignored": "the rest of the device not compared",
    }
    _table(
        {
            "equal" if found.is_equal else "DIFFERENT": f"{found.source} and {found.target}",
            "format": _format(found.format, found.compressions),
            "image": _size(found.size),
            "disk": _size(found.disk_size) + (f"; {rest[found.rest]}" if found.rest else ""),
            "compared": _size(found.compared),
            "sample": _sample(found),
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


def _sample(found: Verification) -> str:
    if found.sample is None:
        return ""
    chance = f"a difference of 1 MiB is found with a probability of {found.chance:.2%}"
    return f"{found.sample.amount}, --seed {found.sample.seed}; {chance}"


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


def _read(done: Result) -> str:
    text = _size(done.read)
    if done.resumed:
        text += f", and {_size(done.resumed)} from an earlier attempt"
    if done.refetched:
        text += f"; {_size(done.refetched)} of that attempt were no longer on storage and were fetched again"
    return text


def inspection(found: Inspection, obj: parameters.Context) -> int:
    """Print the result of an inspection; return the exit status, which is the obstacle's if there is one."""
    offer, content = found.survey.offer, found.survey.content
    obstacle = None if found.obstacle is None else words.message(found.obstacle)
    status = 0 if found.obstacle is None else found.obstacle.status
    route = "" if found.plan is None else str(found.plan.route)
    reason = "" if found.plan is None else found.plan.reason
    if obj.as_json:
        as_json(_as_fields(found))
        return status
    volume = f"{_size(found.volume_size)} with {float(found.overhead):.1%} for the file system"
    _table(
        {
            "source": found.source,
            "format": _format(content.format, content.compressions),
            "virtual size": _size(content.virtual_size)
            if found.stated_size is None
            else f"{_size(found.stated_size)}, as {content.compressions[0]} states",
            "volume needed": volume if found.volume_size is not None else "unknown",
            "size as served": _size(offer.size),
            "identity": offer.identity or "none: an interrupted import cannot be resumed",
            "byte ranges": "yes" if offer.ranges else "no",
            "route": f"{route}: {reason}" if route else "",
            "scratch": "needed (--scratch DIRECTORY)"
            if found.plan is not None and found.plan.scratch
            else "",
            "obstacle": obstacle or "",
            **_details(found.details),
        }
    )
    return status


def _updated(done: Result) -> str:
    found = done.changes
    if found is None:
        return ""
    compared, differed = units.format_size(found.compared), units.format_size(found.differed)
    return f"{differed} of {compared} differed, {units.format_size(found.written)} written"


def _layer(fields: Mapping[str, Any]) -> str:
    backing = fields["backingFile"]
    named = f"backing file {backing}" if backing is not None else "names no backing file"
    bitmaps = f", dirty bitmaps {', '.join(fields['bitmaps'])}" if fields["bitmaps"] else ""
    shown = f"{units.format_size(fields['bytes'])} of {units.format_size(fields['virtualSize'])}"
    return f"{fields['name']}: {shown} ({named}{bitmaps})"


def _as_fields(found: Inspection) -> dict[str, object]:
    """Return the result of an inspection as JSON fields."""
    offer, content = found.survey.offer, found.survey.content
    return {
        "source": found.source,
        "format": content.format,
        "compression": list(content.compressions),
        "virtualSize": content.virtual_size,
        "statedSize": found.stated_size,
        "volumeSize": found.volume_size,
        "overhead": float(found.overhead),
        "size": offer.size,
        "identity": offer.identity,
        "ranges": offer.ranges,
        "route": None if found.plan is None else str(found.plan.route),
        "reason": None if found.plan is None else found.plan.reason,
        "scratch": found.plan is not None and found.plan.scratch,
        "obstacle": None if found.obstacle is None else words.message(found.obstacle),
        **({} if found.obstacle is None else {"error": words.as_fields(found.obstacle)}),
        **found.details,
    }


def _table(rows: Mapping[str, object], *, err: bool = False) -> None:
    shown = {name: value for name, value in rows.items() if value not in {"", None}}
    width = max(map(len, shown))
    for name, value in shown.items():
        say(f"{name:>{width}}  {errors.one_line(str(value))}", err=err)


def _details(details: Mapping[str, object]) -> dict[str, str]:
    readable = {_words(name): _readable(value) for name, value in details.items() if name != "chain"}
    layers: Any = details.get("chain", ())
    return readable | {f"layer {number}": _layer(each) for number, each in enumerate(layers, 1)}


def _words(name: str) -> str:
    """Return the name of a JSON field as words: ``checksumFile`` is ``checksum file``."""
    return "".join(f" {each.lower()}" if each.isupper() else each for each in name)


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
