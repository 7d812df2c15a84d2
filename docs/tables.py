"""Sphinx directives whose content comes from the code: nothing that the code knows is written by hand.

``{commands}``: every command with its options. ``{variables} ROLE``: the environment of a role.
``{settings}``: the variables that set options.
``{matrix}``: the route of each format from each source. ``{strangers}``: what is not a disk.
``{printed} CLASS``: how an error is printed, and the reasons that the program gives for it.
``{costs}``: what imports cost. ``{predicted}``: how long many took, and what deploy/estimate.py predicts.
``{support}``: the versions that tests, schemas and a cluster's page name.
Each returns lines of Markdown (tests/check/docs/test_tables.py).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import messages

import cdi_worker
from cdi_worker import errors, sources
from cdi_worker.formats import detect
from cdi_worker.importer import plan, request
from cdi_worker.importer.commands import command, cron, group, parameters, populators
from cdi_worker.importer.kubernetes import pod
from cdi_worker.importer.roles import importer
from cdi_worker.importer.send import volume
from cdi_worker.importer.survey import Survey
from cdi_worker.importer.upload import settings as upload_settings
from cdi_worker.sources import base, fields, trust

GIB = 1 << 30


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table."""

    def line(cells: tuple[str, ...]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return ["", line(head), f"|{'---|' * len(head)}", *map(line, rows), ""]


# -- commands ----------------------------------------------------------------------------------


def commands(_argument: str = "") -> Iterator[str]:
    """Yield each command with its synopsis, its text and its options."""
    top = click.Context(group.cli, info_name="cdi-worker")
    for name in group.cli.list_commands(top):
        made = group.cli.get_command(top, name)
        if made is not None and not made.hidden:
            yield from _command(made, click.Context(made, parent=top, info_name=name), f"## {name}")
    yield from _command(group.cli, top, "## Without a command: a pod's role")


def _command(made: click.Command, context: click.Context, heading: str) -> Iterator[str]:
    yield from ("", heading, "", "```text", made.get_usage(context).removeprefix("Usage: "), "```", "")
    yield from inspect.cleandoc(made.help or "").partition("\f")[0].splitlines()
    yield ""
    if not isinstance(made, command.Command):
        return
    if made.example:
        yield from ("```sh", *made.example.strip().splitlines(), "```", "")
    for title, example, options in made.sections(context):
        cells = ((f"`{option}`", text.replace("<", "&lt;")) for option, text in options)
        yield from table((title, "meaning"), cells)
        if example:
            yield from ("```sh", example, "```", "")


# -- environment -------------------------------------------------------------------------------


def settings(_argument: str = "") -> list[str]:
    """Return the table of the variables that set options, with the commands that have them."""
    top = click.Context(group.cli, info_name="cdi-worker")
    found: dict[str, tuple[str, list[str]]] = {}
    for name in ("", *group.cli.list_commands(top)):
        made = group.cli.get_command(top, name) if name else group.cli
        if not isinstance(made, command.Command) or made.hidden:
            continue
        for param in made.get_params(click.Context(made, parent=top, info_name=name) if name else top):
            if isinstance(param, parameters.Option) and not param.here and not param.hidden:
                found.setdefault(param.variable, (f"--{param.key}", []))[1].append(name or "a pod's role")
    everywhere = max(len(names) for _, names in found.values())
    rows = (
        (f"`{variable}`", f"`{option}`", "all" if len(names) == everywhere else ", ".join(names))
        for variable, (option, names) in sorted(found.items())
    )
    return table(("variable", "option", "commands"), rows)


#: What reads the environment, and the variables that it reads besides those of sources.
VARIABLES = {
    "importer": importer.VARIABLES,
    "uploadserver": upload_settings.VARIABLES,
    "cloner": volume.VARIABLES,
    "commands": (),
    "populators": populators.VARIABLES,
    "poller": cron.VARIABLES,
}
#: The fields of an access that commands read from the variables of a source's own tools.
OF_TOOLS = {
    "user": "user",
    "password": "password",
    "ca_file": "files with CA certificates, separated by colons",
}


def environment(role: str) -> list[str]:
    """Return the table of the variables that ``role`` reads, with those of the sources it can use."""
    rows = [(f"`{each.name}`", each.meaning, _code(each.default)) for each in VARIABLES[role]]
    if role == "commands":
        rows += [
            (f"`{name}`", f"{kind.name}: {OF_TOOLS[to]}", "")
            for kind in sources.own()
            for to, name in kind.location_type.variables.items()
        ]
    rows += _declared(base.PROXIES if role == "populators" else role)
    if role in {"importer", "commands"}:
        rows += _of_sources(role)
    if role == "populators":
        fields = {name: field for name, (field, _) in sources.find("glance").table.items()}
        rows += [(f"`{name}`", fields[to].help.rstrip("."), "") for name, to in populators.OPENSTACK.items()]
    return table(("variable", "meaning", "default"), rows)


def _declared(role: str) -> list[tuple[str, str, str]]:
    """Return the rows of the variables that set a field of a request, an access or a clone."""
    return [
        (
            f"`{field.env}`",
            f"{f'`{field.on}`: ' if field.flag else ''}{field.help.rstrip('.')}",
            _code(default) if isinstance(default, str) else "",
        )
        for owner in (request.Request, base.Access, volume.Settings)
        for _, field, default in fields.declared(owner)
        if field.is_read_by(role)
    ]


def _code(text: str) -> str:
    return f"`{text}`" if text and " " not in text else text


def _of_sources(role: str) -> list[tuple[str, str, str]]:
    found: dict[str, tuple[list[str], str, str]] = {}
    for kind in sources.own():
        for field, default in kind.table.values():
            if field.is_read_by(role):
                shown = default if isinstance(default, str) else ""
                for name in (field.env, *field.more):
                    found.setdefault(name, ([], field.help, shown))[0].append(kind.name)
    return [
        (f"`{name}`", f"{', '.join(kinds)}: {meaning.rstrip('.')}", _code(default))
        for name, (kinds, meaning, default) in found.items()
    ]


# -- formats -----------------------------------------------------------------------------------


class Column(NamedTuple):
    """Sources that the planner treats alike. ``ways``: how they are read, fields of ``Survey``.

    ``raw``: their disks are always raw.
    """

    title: str
    kinds: frozenset[str]
    facts: base.Facts
    ways: tuple[str, ...] = ()
    raw: bool = False


class Layout(NamedTuple):
    """What the planner asks about an image that the built-in readers support."""

    unit: str
    crowded: bool = False


FACTS = base.Facts(name="disk", size=GIB)
COLUMNS = (
    Column(
        "http with byte ranges, s3, gcs, a local file",
        frozenset({"http", "s3", "gcs", "local"}),
        FACTS,
        ("ranges",),
    ),
    Column("http without byte ranges, vsphere (VMDK)", frozenset({"http", "vsphere"}), FACTS),
    Column("registry", frozenset({"registry"}), FACTS),
    Column("glance", frozenset({"glance"}), dataclasses.replace(FACTS, checksum="md5:"), ("ranges",)),
    Column("an upload, a pipe", frozenset({"local"}), dataclasses.replace(FACTS, once=True)),
    Column(
        "imageio, nbd, vddk, kubevirt, volume",
        frozenset({"imageio", "nbd", "vddk", "kubevirt", "volume"}),
        FACTS,
        ("ranges", "extents"),
        raw=True,
    ),
)
#: Formats, and whether a built-in reader reads all of their variants.
LAYOUTS: dict[str, Any] = {
    "qcow2": Layout("clusters"),
    "vmdk": Layout("grains"),
    "vdi": Layout("blocks"),
    "vhd": Layout("blocks"),
    "vhdx": Layout("blocks"),
}
#: In place of a format: the images that the built-in readers do not support.
OTHERS = "left to qemu-img"


def matrix(_argument: str = "") -> list[str]:
    """Return the table of routes: formats and compressions by sources."""
    rows = []
    for form in ("raw", "iso", "qcow2", "vmdk", "vdi", "vhd", "vhdx", OTHERS):
        for compressions in ((), ("gz",)):
            how = ", ".join(sorted(detect.COMPRESSIONS)) if compressions else "none"
            cells = (cell(form, compressions, column) for column in COLUMNS)
            rows.append((f"**{form}**", how, *cells))
    tar = ("a tar archive, with content type `archive`", ", ".join(("none", *sorted(detect.COMPRESSIONS))))
    rows.append((*tar, *(_archive(column) for column in COLUMNS)))
    return table(("format", "compression", *(column.title for column in COLUMNS)), rows)


def cell(form: str, compressions: tuple[str, ...], column: Column) -> str:
    """Return the route, and whether it needs scratch, as the planner chooses."""
    if column.raw and (form != "raw" or compressions):
        return "not possible"
    ways = dict.fromkeys(column.ways, True)
    found = Survey(
        format=form, compressions=compressions, virtual_size=GIB, available=GIB, scratch=GIB, **ways
    )
    readable = dataclasses.replace(found, layout=LAYOUTS.get(form))
    if form == "vhd":
        # A fixed one is raw with a footer, a dynamic one is not.
        fixed = chosen(column.facts, dataclasses.replace(found, raw=GIB))
        return f"fixed: {fixed}; dynamic: {chosen(column.facts, readable)}"
    return chosen(column.facts, readable)


def chosen(facts: base.Facts, found: Survey) -> str:
    """Return the planner's route with scratch space, marked if it needs it."""
    wanted = request.Request(location=cdi_worker.Location("http://host/disk"), target="disk.img")
    made = plan.plan(wanted, trust.Demanded(), facts, found)
    if made.scratch:
        return f"{made.route}, **scratch**"
    return str(made.route) if made.random else f"{made.route}, in order"


def _archive(column: Column) -> str:
    kinds = [kind for kind in sources.own() if kind.name in column.kinds]
    return "unpack" if any(kind.archives for kind in kinds) else "not possible"


def strangers(_argument: str = "") -> list[str]:
    """Return the table of contents that are recognised and refused."""
    return table(("content", "message"), ((name, f"`{why}`") for name, why in detect.STRANGERS.items()))


# -- errors ------------------------------------------------------------------------------------


def printed(name: str) -> list[str]:
    """Return the exit status of an error, how commands and pods print it, and its reasons."""
    kind = messages.KINDS[name]
    again = "; may be retried without a change" if kind.retryable else ""
    command = "; ".join(filter(None, (kind.terminal or kind.template, kind.remedy.text(errors.TERMINAL))))
    texts = {"command": command, "pod": kind.phrase + kind.template}
    # Fields without their formats, such as {size:size}.
    rows = [(by, re.sub(r"(\{[a-z_]+)[:!][^}]*", r"\1", f"`{text}`")) for by, text in texts.items()]
    # Spaces at both ends are not part of the literal text, which may have a backquote.
    known = [f"- `` {text} ``" for text in messages.reasons().get(name, ())]
    return [f"Exit status {kind.status}{again}.", *table(("printed by", "message"), rows), *known, ""]


# -- scale -------------------------------------------------------------------------------------

#: Links in bits a second, as columns.
LINKS = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
#: What rows of imports at once are compared with.
PREDICTED = "deploy/estimate.py"
BENCHMARKS = Path(__file__).parent / "about/benchmarks"


def costs(_argument: str = "") -> list[str]:
    """Return the table of what imports of each kind cost, in a pod with the limits of a Job."""
    known = json.loads((Path(__file__).parents[1] / "deploy/costs.json").read_text())
    limit = int(pod.RESOURCES["limits"]["cpu"].removesuffix("m")) / 1000
    rows = [
        (
            f"`{kind}`",
            *(f"{each[name] / GIB:.2f} GiB" for name in ("read", "written")),
            f"{each['cpu']:.2f} s",
            f"{each['memory'] >> 20} MiB",
            *(f"{max(each['read'] * 8 / link, each['cpu'] / limit):.1f} s" for link in LINKS.values()),
        )
        for kind, each in known["kinds"].items()
    ]
    head = ("kind", "read", "written", "CPU", "memory", *(f"at {link}" for link in LINKS))
    more = f"""\
Of the CPU time, {known["start"]:.2f} s are for starting. While more imports run than there are CPUs, each
needs {known["crowded"]:.2f} times the CPU time. The last columns: seconds alone on such a link, in a pod
with its limit of {limit:g} CPU."""
    return [*table(head, rows), *more.splitlines(), ""]


def predicted(_argument: str = "") -> list[str]:
    """Return the table of imports at once, measured and predicted."""
    rows = []
    for path in sorted(BENCHMARKS.glob("*.jsonl")):
        facts, *lines = map(json.loads, path.read_text().splitlines())
        for line in lines:
            medians = [statistics.median(cost[0] for cost in costs) for costs in line["costs"].values()]
            if PREDICTED in line["costs"]:
                times = (*(f"{median:.1f} s" for median in medians), f"{medians[1] / medians[0]:.2f}")
                rows.append((line["row"].removesuffix(", file"), facts["system"], *times))
    return table(("imports", "system", "measured", "predicted", "ratio"), rows)


# -- versions ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
#: Numbers of the releases of Debian that .ci/run names.
DEBIAN = {"bookworm": "12", "trixie": "13"}


def support(_argument: str = "") -> list[str]:
    """Return the table of versions, by how each is known. All are read from the files that use them."""
    debian = [DEBIAN[name] for name in _named(r"echo (bookworm|trixie)\b", ".ci/run")]
    programs = [benchmarked(each) for each in debian]
    (python,) = _named(r'^requires-python = ">=(\S+)"', "pyproject.toml")
    (newest,) = _named(r'"kubernetes-validate>=(\S+)"', "pyproject.toml")
    (oldest,) = _named(r'^OLDEST = "(\S+)"', "tests/support/kubernetes_schemas.py")
    (api,) = _named(r"datavolumes\.cdi\.kubevirt\.io, (\w+),", "importer/kubernetes/datavolume.json")
    (releases,) = _named(r"those of CDI (.*)\. Our", "deploy/README.md")
    exports = set(_named(r"/(export\.kubevirt\.io/\w+)/", "tests/support/kubevirt.py"))
    populators_ = [name for name in group.COMMANDS if name.endswith("-populator")]
    rows = {
        f"Python, {python} or later": (", ".join(each["Python"] for each in programs), ""),
        "Debian": (", ".join(debian), ""),
        "qemu-img": (", ".join(each["qemu-img"] for each in programs), ""),
        "Kubernetes": ("", f"{oldest}, and the latest: {newest} or later"),
        "CDI": (releases, api),
        "KubeVirt": (", ".join(exports), ""),
        "Forklift": (", ".join(populators_), ""),
    }
    ran = on_cluster()
    lines = ((name, *cells, ran.get(name, "")) for name, cells in rows.items())
    return table(("", "tests", "schemas", "cluster"), lines)


def _named(pattern: str, file: str) -> list[str]:
    return re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)


def benchmarked(debian: str) -> dict[str, str]:
    """Return the versions of the programs in a release of Debian, as the benchmarks have noted them."""
    with (BENCHMARKS / f"debian-{debian}.jsonl").open() as lines:
        return dict(json.loads(next(lines))["versions"])


def on_cluster() -> dict[str, str]:
    """Return the versions in the table of the cluster's page, by component."""
    page = (ROOT / "docs/pods/cluster.md").read_text()
    rows = page.partition("| component | version |")[2].partition("\n\n")[0].splitlines()[2:]
    return {name: version for name, version, *_ in (row[2:].split(" | ") for row in rows)}


DIRECTIVES: dict[str, Callable[[str], Iterable[str]]] = {
    "commands": commands,
    "variables": environment,
    "settings": settings,
    "matrix": matrix,
    "strangers": strangers,
    "printed": printed,
    "costs": costs,
    "predicted": predicted,
    "support": support,
}


def setup(app: Any) -> dict[str, bool]:
    """Register the directives (Sphinx calls this)."""
    from docutils import nodes, statemachine
    from docutils.parsers.rst import Directive

    def directive(lines: Callable[[str], Iterable[str]]) -> type[Directive]:
        class Generated(Directive):
            optional_arguments = 1

            def run(self) -> list[nodes.Node]:
                found = list(lines(self.arguments[0] if self.arguments else ""))
                place = nodes.section()
                place.document = self.state.document
                text = statemachine.StringList(found, source="docs/tables.py")
                self.state.nested_parse(text, 0, place, match_titles=True)
                return list(place.children)

        return Generated

    for name, lines in DIRECTIVES.items():
        app.add_directive(name, directive(lines))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
