"""Checks of imports by a map that are left out."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, mutant

_DISK = "images/disks/mapped.py"
_UNIT = "tests/images/disks/test_mapped.py::"
_IMPORTS = "tests/end_to_end/test_mapped_imports.py::"


def _disk(what: str, old: str, new: str, *tests: str) -> Mutant:
    return mutant(_DISK, what, old, new, *tests)


MUTANTS = (
    _disk(
        "takes a range with another checksum",
        "        if hashed.digest() != digest:\n            self._drop()\n",
        "        if False:\n            self._drop()\n",
        f"{_UNIT}test_each_range_that_is_wrong_is_fetched_again[0-262144]",
    ),
    _disk(
        "takes a range that stays wrong",
        "        if not is_right:\n            raise",
        "        if False:\n            raise",
        f"{_UNIT}test_range_that_stays_wrong_is_an_error",
    ),
    _disk(
        "writes a range before it is verified",
        "held = low, buffer\n            at = after\n",
        "yield low, buffer\n            at = after\n",
        f"{_UNIT}test_range_that_stays_wrong_is_an_error",
    ),
    _disk(
        "takes a stream with another checksum",
        "            if digest and hashed.digest() != digest:\n",
        "            if False:\n",
        f"{_IMPORTS}test_disk_with_a_range_that_stays_wrong_is_refused[file-False]",
    ),
    _disk(
        "takes data of a stream where nothing is mapped",
        "                if not directio.is_zero(buffer):\n",
        "                if False:\n",
        f"{_IMPORTS}test_stream_with_data_where_nothing_is_mapped_is_refused[file-gz]",
    ),
    _disk(
        "takes a stream that ends early",
        "            if (count := readers.fill(reader, buffer)) < len(buffer):\n",
        "            if (count := readers.fill(reader, buffer)) < 0:\n",
        f"{_UNIT}test_stream_that_ends_in_a_hole_is_refused",
    ),
    _disk(
        "takes a stream with more than its map",
        "        if reader.readinto(memoryview(bytearray(1))):\n",
        "        if False:\n",
        f"{_UNIT}test_stream_of_another_length_is_refused[1]",
    ),
    _disk(
        "takes a stream that is a fixed VHD",
        "        if self._footer and vhd.is_fixed(last):\n",
        "        if False:\n",
        f"{_IMPORTS}test_other_formats_are_refused[file-False-vhd-fixed]",
    ),
    _disk(
        "overwrites a piece that waits to be written",
        "    def _drop(self) -> None:\n",
        "    def _drop(self) -> None:\n        return\n",
        f"{_UNIT}test_stream_delivers_what_differs_from_another_map[0]",
    ),
    _disk(
        "keeps a range of another algorithm",
        "if had is not None and had.algorithm == blocks.algorithm else",
        "if had is not None else",
        f"{_UNIT}test_selection_of_two_maps",
    ),
    mutant(
        "importer/routes/delivery.py",
        "zeroes what was wrong after it was written right",
        "        each.forget(start, end)\n    out.flush()\n",
        "        each.forget(start, end)\n",
        f"{_IMPORTS}test_only_the_wrong_range_is_fetched_again[block512-zeros]",
    ),
    mutant(
        "importer/routes/delivery.py",
        "compares storage with what was wrong",
        "        each.forget(start, end)\n    out.flush()\n",
        "        pass\n    out.flush()\n",
        f"{_IMPORTS}test_only_the_wrong_range_is_fetched_again[file-other-data]",
    ),
    mutant(
        "importer/routes/delivery.py",
        "resumes what another map has verified",
        "        *([asked.blocks.digest] if asked.blocks else ()),\n",
        "",
        f"{_IMPORTS}test_other_map_starts_over",
    ),
    mutant(
        "importer/execute.py",
        "updates a disk that is not the one of its map",
        "    if present.size < size or (",
        "    if False and (",
        f"{_IMPORTS}test_target_that_cannot_be_what_its_map_says_is_refused[file]",
    ),
    mutant(
        "importer/execute.py",
        "updates a disk that an interrupted run has changed by its map",
        "    if targets.is_half_changed(claim):\n",
        "    if False:\n",
        f"{_IMPORTS}test_target_that_cannot_be_what_its_map_says_is_refused[file]",
        f"{_IMPORTS}test_target_that_cannot_be_what_its_map_says_is_refused[block512]",
    ),
    mutant(
        "importer/plan.py",
        "imports an image of another size than its map",
        "    if size not in {None, blocks.map.size}:\n",
        "    if False:\n",
        f"{_IMPORTS}test_image_of_another_size_is_refused[file-4096-ranges]",
    ),
    mutant(
        "importer/plan.py",
        "imports another format by a map",
        '    if content.format not in {"raw", "iso"} or content.chain or offer.blank:\n',
        "    if False:\n",
        f"{_IMPORTS}test_other_formats_are_refused[file-True-qcow2]",
    ),
    mutant(
        "importer/contact.py",
        "imports by a map without the demanded signature",
        "        blocks = maps.read(demand.map, demand, kind, location, reading)\n",
        "        blocks = maps.read(demand.map, trust.NOTHING, kind, location, reading)\n",
        f"{_IMPORTS}test_map_without_the_demanded_signature_is_refused[missing]",
    ),
    mutant(
        "importer/result.py",
        "calls a disk verified of which a part was not read",
        "if request.blocks and not request.had else {}",
        "if request.blocks else {}",
        f"{_IMPORTS}test_update_moves_only_ranges_that_differ[file-ranges]",
    ),
)
