"""Search for input that breaks a parser of a target, with atheris (libFuzzer).

    make fuzz TARGET=documents SECONDS=600
    make fuzz TARGET=documents RUNS=1000000
    python -m tests.proofs.fuzz --corpus documents

New inputs are kept in build/fuzz; the first ones are those of tests/proofs/fuzz/corpus. ``--corpus`` writes
those again, after a change of a target.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

from tests.proofs.fuzz import inputs

_INSTRUMENTED = [
    "cdi_worker.formats",
    "cdi_worker.sources.responses",
    "cdi_worker.importer.kubernetes",
    "cdi_worker.sources",
    "cdi_worker.importer.upload",
]


def main(name: str, folder: Path, options: list[str]) -> None:
    import atheris

    # With what is installed beside it, this takes seconds: more than an input has on a busy machine.
    importlib.import_module("jsonschema")
    with atheris.instrument_imports(include=_INSTRUMENTED):
        target = importlib.import_module(f"tests.proofs.fuzz.{name}")
    folder.mkdir(parents=True, exist_ok=True)
    for number, (parser, data) in enumerate(inputs.read(name)):
        selector = list(target.PARSERS).index(parser)
        (folder / f"seed-{number}").write_bytes(bytes([selector]) + data)
    parsers = list(target.PARSERS.values())

    def one(data: bytes) -> None:
        if data:
            inputs.run(parsers[data[0] % len(parsers)], data[1:])

    atheris.Setup([sys.argv[0], str(folder), "-timeout=20", *options], one)
    atheris.Fuzz()


def write(name: str) -> None:
    """Write the corpus of a target."""
    target = importlib.import_module(f"tests.proofs.fuzz.{name}")
    folder = inputs.FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    counts: dict[str, int] = {}
    for parser, data in target.seeds():
        counts[parser] = counts.get(parser, 0) + 1
        (folder / f"{parser}-{counts[parser]}").write_bytes(data)


if __name__ == "__main__":
    if sys.argv[1] == "--corpus":
        write(sys.argv[2])
    else:
        main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
