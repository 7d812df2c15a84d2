"""Sources that are far away, against their bytes at the speed of the wire."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tests.bench import bench as benches
from tests.bench import inputs
from tests.bench.bench import Bench, Sides
from tests.bench.settings import MIB, POD
from tests.bench.wire import Wire
from tests.support import servers, tls

LOSSY = Wire(0.05, 20_000_000, 0.01)
FAST = Wire(0.05, 125_000_000, mtu=9000)


def distant(bench: Bench, name: str, wire: Wire, *, secure: bool = False) -> Iterator[Sides]:
    """Measure an image that takes some seconds on the wire, also against one download."""
    if name == "raw":
        path = inputs.noise(bench.directory, 128 * MIB)
    elif wire is FAST or name in {"c.qcow2", "raw.gz"}:
        path = bench.form(name)
    else:
        path = inputs.form(inputs.disk(bench.directory, POD.size, POD.data), name)
    with inputs.folder(bench.directory, "distant") as own, wire.laid(own):
        authority = tls.Authority(own)
        settings = servers.Settings(pair=authority.issue() if secure else None)
        with servers.nginx(own, bench.directory, settings) as web:
            url, trust = web.url(path), authority.certificate
            curl = f"curl -sf --cacert {trust} {url} -o {bench.file} && sync {bench.file}"
            yield Sides(
                bench.imports(url, bench.file, "--ca-file", trust),
                bench.shell(curl, bench.file),
                bound=wire.seconds(path.stat().st_size),
            )


for _name in ("raw", "qcow2", "vmdk", "c.qcow2", "raw.gz"):
    _row = benches.row(f"{_name}: 50 ms, 20 MB/s, 1 % loss", rival="curl", more=True)
    _row(functools.partial(distant, name=_name, wire=LOSSY))
_row = benches.row("qcow2: 50 ms, 20 MB/s, 1 % loss, https", rival="curl", more=True)
_row(functools.partial(distant, name="qcow2", wire=LOSSY, secure=True))
_row = benches.row("qcow2: 50 ms, 125 MB/s", rival="curl", more=True)
_row(functools.partial(distant, name="qcow2", wire=FAST))
