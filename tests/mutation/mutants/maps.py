"""Checks of block maps that are left out."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, mutant

_FORMAT = "formats/bmap.py"


def _hostile(what: str, old: str, name: str, new: str = "        if False:\n") -> Mutant:
    return mutant(_FORMAT, what, old, new, f"tests/formats/test_bmap.py::test_hostile_map_is_refused[{name}]")


MUTANTS = (
    mutant(
        _FORMAT,
        "takes a map whose own checksum is wrong",
        "    if calculated != stated:\n",
        "    if False:\n",
        "tests/formats/test_bmap.py::test_changed_map_is_refused",
    ),
    _hostile(
        "takes overlapping ranges of a map",
        "        if self._ranges and first * block < self._ranges[-1][1]:\n",
        "overlap",
    ),
    _hostile(
        "takes ranges beyond the image of a map",
        "        if last < first or last * block >= size:\n",
        "beyond",
        "        if last < first:\n",
    ),
    _hostile(
        "takes ranges of a map that end before they start",
        "        if last < first or last * block >= size:\n",
        "backwards",
        "        if last * block >= size:\n",
    ),
    _hostile(
        "takes a count of blocks that is not the size",
        "        if count != -(-size // block):\n",
        "other size",
    ),
    _hostile(
        "takes another count of mapped blocks",
        '        if blocks.mapped_blocks != self._number("MappedBlocksCount"):\n',
        "other mapped count",
    ),
    _hostile(
        "takes blocks of any size",
        "        if not _SMALLEST_BLOCK <= block <= _LARGEST_BLOCK or block & (block - 1):\n",
        "odd blocks",
    ),
    _hostile(
        "takes two values of a field of a map",
        "            if name in self.fields:\n",
        "two sizes",
        "            if False:\n",
    ),
    _hostile(
        "reads a number of a map around an element",
        '        elif path[-1] in _FIELDS or path[-1] == "Range":\n',
        "split number",
        "        elif False:\n",
    ),
    _hostile("takes a map without checksums", "        if not self._digest:\n", "no checksum"),
    mutant(
        "formats/smallxml.py",
        "takes a document type in XML",
        "    parser.StartDoctypeDeclHandler = doctype\n",
        "",
        "tests/formats/test_bmap.py::test_hostile_map_is_refused[entities]",
    ),
    mutant(
        "formats/smallxml.py",
        "takes elements of XML in any depth",
        "        if len(path) >= DEEPEST:\n",
        "        if False:\n",
        "tests/formats/test_bmap.py::test_hostile_map_is_refused[deep]",
    ),
)
