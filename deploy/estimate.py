#!/usr/bin/env python3
"""Estimate how long many imports take, how many pods should run at once, and what limits them.

LIST has a line for each disk: SIZE [KIND] [HOST], separated by spaces, tabs, commas or semicolons.
SIZE: of the image file, such as 40Gi; for vddk, vsphere and imageio the data on the disk.
HOST: the server that it is read from. The number of pods is for each host, as Kueue's queues have it.

The run is simulated: disks start in the order of the list, and pods share CPUs, links and storage.
What an import costs was measured: costs.json beside this program.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: What Kueue counts: pods, with thousandths of a CPU and MB for two containers, as a pod with node pull has.
REQUESTS = {"pods": 1, "cpu": 200, "memory": 120}
#: A number of pods is enough if twice as many take at least this part of its time.
ENOUGH = 0.95
#: Names of hosts become names of queues (RFC 1123); a list without hosts has one queue.
HOST = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,61}[a-z0-9])?")
WITHOUT_HOST = "imports"
NONE = float("inf")


class Invalid(argparse.ArgumentTypeError):
    """The list or an option cannot be used."""


class Disk(NamedTuple):
    """A disk: what it needs of each resource, and the seconds that it takes alone."""

    host: str
    needs: Mapping[str, float]
    alone: float


class Estimate(NamedTuple):
    """The seconds with ``pods`` for each host; ``limits``: the part of them in which each thing limits."""

    pods: int
    seconds: float
    limits: Mapping[str, float]


def number(text: str, pattern: str = r"()()", what: str = "a number") -> float:
    """Return a positive number with one of the suffixes of ``pattern``."""
    found = re.fullmatch(rf"(\d{{1,15}}(?:\.\d{{1,9}})?){pattern}", text, re.ASCII)
    if not found or not float(found[1]):
        raise Invalid(f"{text[:40]!r} is not {what}")
    return float(found[1]) * (1024 if found[3] else 1000) ** " kMGTP".index(found[2].replace("K", "k") or " ")


def size(text: str) -> float:
    """Return the bytes of ``40Gi``, ``40G``, ``40GiB`` or ``40GB``."""
    return number(text, r"([kKMGTP]?)(i?)B?", "a size such as 40Gi or 500M")


def rate(text: str) -> float:
    """Return the bytes per second of ``10Gbit`` or ``500Mi/s``."""
    if text.endswith(("bit", "bit/s")):
        return number(text, r"([kMGT])()bit(?:/s)?", "a rate such as 10Gbit") / 8
    return number(text, r"([kKMGTP]?)(i?)(?:B?/s)?", "a rate such as 10Gbit or 500Mi/s")


def disks(lines: Iterable[str], costs: Mapping[str, Any], given: argparse.Namespace) -> Iterator[Disk]:
    """Read the list; raise with the number of the first line that is wrong."""
    for line_number, line in enumerate(lines, 1):
        fields = re.split(r" *[,;\t] *| +", line.partition("#")[0].replace('"', "").strip())
        if fields == [""] or (line_number == 1 and fields[0].lower() == "size"):
            continue
        try:
            yield _disk([*fields, *[""] * 2], costs, given)
        except Invalid as err:
            raise Invalid(f"{given.list}: line {line_number}: {err}") from None


def _disk(fields: Sequence[str], costs: Mapping[str, Any], given: argparse.Namespace) -> Disk:
    kind, host = fields[1] or given.kind, fields[2].lower() or WITHOUT_HOST
    stated = size(fields[0])
    if stated < 1 << 20:
        raise Invalid(f"{fields[0]} is less than 1Mi; write a unit, such as 40Gi")
    if kind not in costs["kinds"]:
        raise Invalid(f"unknown kind {kind[:40]!r}; known: {', '.join(costs['kinds'])}")
    if not HOST.fullmatch(host):
        raise Invalid(f"{host[:70]!r} is not a name for a host: use a-z, 0-9, - and .")
    if any(fields[3:]):
        raise Invalid(f"{fields[3][:40]!r}: a line is SIZE KIND HOST")
    cost, start = costs["kinds"][kind], costs["start"]
    part = stated / cost["size"]
    read, cpu = cost["read"] * part, start + max(0, cost["cpu"] - start) * part
    needs = {"CPU": cpu, "link": read, f"link of {host}": read, "storage": cost["written"] * part}
    needs = {name: need for name, need in needs.items() if need}
    return Disk(host, needs, given.pod_start + max(cpu / given.pod_cpu, read / given.rate))


def shared(running: Sequence[Disk], capacity: Mapping[str, float]) -> tuple[list[float], str]:
    """Return the part that each disk gets of its own speed, and what limits most of them, if anything does.

    All get the same part until a resource is used up; those that do not need it get more.
    """
    parts, left, limits = [1.0] * len(running), dict(capacity), {"": 0}
    paces = [
        {name: need / each.alone for name, need in each.needs.items() if name in left} for each in running
    ]
    rest = set(range(len(running)))
    while rest:
        used = collections.Counter[str]()
        for each in rest:
            used.update(paces[each])
        part, name = min(((left[name] / each, name) for name, each in used.items()), default=(1.0, ""))
        if part >= 1:
            break
        full = {each for each in rest if name in paces[each]}
        limits[name] = len(full)
        rest -= full
        for each in full:
            parts[each] = max(part, 1e-9)
            for other, pace in paces[each].items():
                left[other] -= pace * part
    return parts, max(limits, key=lambda name: limits[name])


def simulate(found: Sequence[Disk], pods: int, capacity: Mapping[str, float]) -> Estimate:
    """Run all disks with so many pods for each host."""
    waiting: dict[str, collections.deque[Disk]] = {}
    for disk in found:
        waiting.setdefault(disk.host, collections.deque()).append(disk)
    running: list[tuple[Disk, float]] = []  # with the part of the work that is left
    seconds, limits = 0.0, collections.defaultdict[str, float](float)
    while True:
        busy = collections.Counter(disk.host for disk, _ in running)
        for host, queue in waiting.items():
            running += [(queue.popleft(), 1.0) for _ in range(min(pods - busy[host], len(queue)))]
        if not running:
            return Estimate(pods, seconds, {name: each / seconds for name, each in limits.items()})
        parts, limit = shared([disk for disk, _ in running], capacity)
        speeds = [part / disk.alone for part, (disk, _) in zip(parts, running, strict=True)]
        step = min(left / speed for speed, (_, left) in zip(speeds, running, strict=True))
        after = [(disk, left - speed * step) for speed, (disk, left) in zip(speeds, running, strict=True)]
        running = [(disk, left) for disk, left in after if left > 1e-9]
        limits[limit or ("pods" if any(waiting.values()) else "the last disks")] += step
        seconds += step


def search(found: Sequence[Disk], most: int, capacity: Mapping[str, float]) -> list[Estimate]:
    """Return estimates for several numbers of pods; the last has the fewest that are enough."""
    known: dict[int, Estimate] = {}

    def is_enough(pods: int, more: int) -> bool:
        for each in {pods, more} - known.keys():
            known[each] = simulate(found, each, capacity)
        return known[pods].seconds * ENOUGH <= known[more].seconds

    less, pods = 0, 1
    while not is_enough(pods, more := min(most, pods * 2)):
        less, pods = pods, more
    best = max(known)
    while pods - less > 1:
        middle = (less + pods) // 2
        less, pods = (less, middle) if is_enough(middle, best) else (middle, pods)
    return [known[each] for each in sorted(known) if each <= pods]


FLAVOR = """\
# Kueue's queues, one for each host, made by deploy/estimate.py: docs/pods/scale.md
apiVersion: kueue.x-k8s.io/v1beta1
kind: ResourceFlavor
metadata: {name: any-node}
"""
QUEUE = """\
---
apiVersion: kueue.x-k8s.io/v1beta1
kind: ClusterQueue
metadata: {{name: {host}}}
spec:
  namespaceSelector: {{}}
  resourceGroups:
  - coveredResources: ["pods", "cpu", "memory"]
    flavors:
    - name: any-node
      resources:
      - {{name: pods, nominalQuota: {pods}}}
      - {{name: cpu, nominalQuota: {cpu}m}}
      - {{name: memory, nominalQuota: {memory}M}}
---
apiVersion: kueue.x-k8s.io/v1beta1
kind: LocalQueue
metadata: {{name: {host}, namespace: {namespace}}}
spec: {{clusterQueue: {host}}}
"""


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add, beside = parser.add_argument, Path(__file__).with_name("costs.json")
    add("list", metavar="LIST", help="a file; -: standard input")
    add("--pods", type=number, help="for each host [default: as many as are useful]")
    add("--host-pods", type=number, default=NONE, help="at most for each host, such as 4 for vddk")
    add("--link", type=rate, default=NONE, metavar="RATE", help="of the cluster, such as 10Gbit or 500Mi/s")
    add("--host-link", type=rate, default=NONE, metavar="RATE", help="of each host")
    add("--storage", type=rate, default=NONE, metavar="RATE", help="that the storage writes")
    add("--rate", type=rate, default=NONE, metavar="RATE", help="that one import reads at most: measure one")
    add("--cpus", type=number, default=NONE, help="of all nodes, for imports")
    add("--memory", type=size, default=NONE, metavar="SIZE", help="of all nodes, for imports")
    add("--pod-cpu", type=number, default=0.75, metavar="CPUS", help="limit of a pod [%(default)s]")
    add("--pod-memory", type=size, default=6e8, metavar="SIZE", help="limit of a pod [600M]")
    add("--pod-start", type=number, default=0, metavar="SECONDS", help="until a pod runs [0]")
    kinds = ", ".join(json.loads(beside.read_text())["kinds"])
    add("--kind", default="raw", help=f"if a line has none [raw]: {kinds}")
    add("--costs", type=Path, default=beside, metavar="FILE", help="another costs.json")
    add("--kueue", metavar="NAMESPACE", help="print the queues of Kueue for these pods")
    add("--json", action="store_true", help="print JSON")
    return parser


def main() -> None:
    """Print the estimates, or the queues."""
    given = _parser().parse_args()
    try:
        path = 0 if given.list == "-" else given.list
        costs = json.loads(given.costs.read_text())
        with open(path, encoding="utf-8-sig", errors="replace") as lines:
            found = list(disks(lines, costs, given))
        hosts = list(dict.fromkeys(disk.host for disk in found))
        if not found:
            raise Invalid(f"{given.list}: has no disks")
        most = min(given.host_pods, given.memory / given.pod_memory // len(hosts))
        pods = int(given.pods or min(most, len(found)))
        if not 0 < pods <= most:
            raise Invalid(f"{pods} pods for each of {len(hosts)} hosts; possible: {most:.0f}")
    except (Invalid, OSError) as err:
        sys.exit(f"estimate: {err}")
    # An import needs more CPU time while others wait for the CPUs.
    known = {"CPU": given.cpus / costs["crowded"], "link": given.link, "storage": given.storage}
    known |= {f"link of {host}": given.host_link for host in hosts}
    capacity = {name: each for name, each in known.items() if each < NONE}
    estimates = [simulate(found, pods, capacity)] if given.pods else search(found, pods, capacity)
    if given.kueue:
        quotas = {name: estimates[-1].pods * each for name, each in REQUESTS.items()}
        queues = (QUEUE.format(host=host, namespace=given.kueue, **quotas) for host in hosts)
        print(FLAVOR + "".join(queues), end="")
    elif given.json:
        print(json.dumps([each._asdict() for each in estimates]))
    else:
        print("pods for each host  all pods   hours  memory   CPU  limit")
        for each in estimates:
            total, limits = each.pods * len(hosts), sorted(each.limits.items(), key=lambda item: -item[1])
            memory, cpu = f"{total * given.pod_memory / 1e9:.1f} GB", f"{total * given.pod_cpu:g}"
            shown = ", ".join(f"{name} {part:.0%}" for name, part in limits if part >= 0.01)
            print(f"{each.pods:18} {total:9} {each.seconds / 3600:7.1f} {memory:>7} {cpu:>5}  {shown}")


if __name__ == "__main__":
    main()
