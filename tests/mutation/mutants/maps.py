"""Checks of block maps that are left out."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, mutant

_FORMAT = "formats/bmap.py"
_VERIFIED = "images/sinks/verified.py"
_SINK = "images/sinks/mapping.py"


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
    mutant(
        _VERIFIED,
        "hashes zeros until the end of a map, without an end",
        "            self._scope.check()\n            digest.update(zeros",
        "            digest.update(zeros",
        "tests/end_to_end/test_maps.py::test_hashing_of_a_hole_is_cancelled",
    ),
    mutant(
        _VERIFIED,
        "hashes what a disk does not have",
        "        if end > self.size:\n",
        "        if False:\n",
        "tests/end_to_end/test_maps.py::test_range_that_a_disk_does_not_have_is_not_hashed",
    ),
    mutant(
        _SINK,
        "maps data that is delivered again as if it were the first",
        "                if self._known.missing(start, stop) != [(start, stop)]:\n",
        "                if False:\n",
        "tests/images/sinks/test_mapping.py::test_what_is_delivered_again_is_read",
    ),
    mutant(
        _SINK,
        "maps data over which zeros are delivered",
        "            if is_again or self._known.missing(start, end) != [(start, end)]:\n",
        "            if False:\n",
        "tests/images/sinks/test_mapping.py::test_zeros_over_data_are_zeros",
    ),
    mutant(
        _SINK,
        "hashes data whose predecessor has not passed",
        "        if offset == piece.at or (offset > piece.at and self._is_zero(piece.at, offset)):\n",
        "        if True:\n",
        "tests/images/sinks/test_mapping.py::test_map_of_a_disk_delivered_in_any_order",
    ),
    mutant(
        _SINK,
        "keeps all data that waits for what is before it",
        " or self._waiting + len(data) > _MOST:\n",
        ":\n",
        "tests/images/sinks/test_mapping.py::test_what_waits_is_bounded",
    ),
    mutant(
        _SINK,
        "returns while the data is still hashed",
        "            futures.wait([work])\n        work.result()\n",
        "            pass\n",
        "tests/images/sinks/test_mapping.py::test_map_of_a_disk_delivered_in_any_order",
    ),
    mutant(
        "importer/routes/delivery.py",
        "maps a disk without what an earlier attempt wrote",
        "            for start, stop in missing:\n",
        "            for start, stop in ():\n",
        "tests/end_to_end/test_maps.py::test_resumed_parts_are_in_the_map",
    ),
    mutant(
        _VERIFIED,
        "takes a range of a map for equal",
        "        if found == digest:\n",
        "        if True:\n",
        "tests/end_to_end/test_maps.py::test_maps_of_bmaptool_are_verified",
    ),
    mutant(
        _VERIFIED,
        "does not compare what a map leaves out",
        "                self.zero(start, end - start)\n            advance",
        "                pass\n            advance",
        "tests/end_to_end/test_maps.py::test_maps_of_bmaptool_are_verified",
    ),
    mutant(
        _VERIFIED,
        "reports a range of a map that it has read once",
        "        if self._digest(start, end, algorithm) != (found, is_zero):\n",
        "        if False:\n",
        "tests/end_to_end/test_maps.py::test_difference_is_read_twice[True]",
    ),
    mutant(
        _VERIFIED,
        "reports a block beside a map that it has read once",
        "            if self._read(first, len(stored)) != stored:\n",
        "            if False:\n",
        "tests/end_to_end/test_maps.py::test_difference_is_read_twice[False]",
    ),
    mutant(
        "importer/mapped.py",
        "verifies only the ranges of a map, not the end of the file",
        '        found.finish(size, is_device=getattr(disk, "is_device", False))\n',
        "        found.image_size = size\n",
        "tests/end_to_end/test_maps.py::test_end_of_the_disk",
    ),
    mutant(
        "importer/mapped.py",
        "maps a disk that is written meanwhile",
        "        destination.unchanged(request.target),\n",
        "",
        "tests/end_to_end/test_maps.py::test_disk_that_changes_has_no_map",
    ),
    mutant(
        "importer/routes/delivery.py",
        "writes the map of a disk without what qemu-img has written",
        "        if missing := mapping.missing(end, size):\n",
        "        if missing := mapping.missing(end, size) and []:\n",
        "tests/end_to_end/test_maps.py::test_every_route_writes_the_map",
    ),
)
