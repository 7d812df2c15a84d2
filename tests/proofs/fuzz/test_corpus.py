"""Every parser takes the corpus, and inputs like it, without another exception than ``errors.Error``.

``make fuzz`` searches further, by what each input reaches.
"""

from __future__ import annotations

import random

import pytest

from tests.proofs.fuzz import documents, formats, inputs

_TARGETS = {"documents": documents.PARSERS, "formats": formats.PARSERS}
#: Inputs for each parser: the same ones each time. ``make prove`` has millions.
_MUTATIONS = 200
_LARGEST = 200 << 10
#: Not those whose inputs are the beginnings of images, or signatures by other keys.
_VALID = {
    "documents": set(documents.PARSERS) - {"simple", "statement", "bundle"},
    "formats": set(formats.PARSERS) - {"archive", "qcow2", "vmdk", "vhdx"},
}


@pytest.mark.parametrize(
    ("target", "parser"), [(target, parser) for target, parsers in _TARGETS.items() for parser in parsers]
)
def test_parser_takes_changed_inputs(target: str, parser: str) -> None:
    seeds = [data for name, data in inputs.read(target) if name == parser]
    assert seeds, "a parser without an input: run python -m tests.proofs.fuzz --corpus"
    for data in seeds:
        inputs.run(_TARGETS[target][parser], data)
    dice = random.Random(parser)
    for number in range(_MUTATIONS):
        data = inputs.mutated(seeds[number % len(seeds)], dice)
        try:
            inputs.run(_TARGETS[target][parser], data)
        except Exception as err:
            err.add_note(f"input: {data!r}")
            raise


@pytest.mark.parametrize("target", _TARGETS)
def test_valid_inputs_are_parsed(target: str) -> None:
    """Else a parser that refuses everything would pass."""
    taken = set()
    for name, data in inputs.read(target):
        try:
            _TARGETS[target][name](data)
        except inputs.errors.Error:
            continue
        taken.add(name)
    assert taken >= _VALID[target]


def test_corpus_is_small() -> None:
    sizes = [path.stat().st_size for path in inputs.FOLDER.rglob("*") if path.is_file()]
    assert sum(sizes) < _LARGEST
