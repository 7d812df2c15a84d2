"""Checks of imports by a map that are left out."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, mutant

_DISK = "images/disks/mapped.py"
_UNIT = "tests/images/disks/test_mapped.py::"
_IMPORTS = "tests/end_to_end/test_mapped_imports.py::"
_UPDATES = "tests/end_to_end/test_updates_by_map.py::"


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
        # Not in every run: two threads must meet.
        f"{_IMPORTS}test_only_the_wrong_range_is_fetched_again[block512-zeros]",
        f"{_IMPORTS}test_only_the_wrong_range_is_fetched_again[block4096-zeros]",
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
        f"{_UPDATES}test_target_that_cannot_be_what_its_map_says_is_refused[file]",
    ),
    mutant(
        "importer/execute.py",
        "updates a disk that an interrupted run has changed by its map",
        "    if targets.is_half_changed(claim):\n",
        "    if False:\n",
        f"{_UPDATES}test_killed_update_continues_without_the_old_map[block4096-one map]",
    ),
    mutant(
        "importer/execute.py",
        "trusts the map of the old disk after this run has written wrong ranges",
        "                asked = _having(part, claim)\n",
        "                asked = part if two_passes or whole.engine.given_up else _having(part, claim)\n",
        f"{_UPDATES}test_old_map_is_not_trusted_after_wrong_ranges[file-one map]",
    ),
    mutant(
        "importer/routes/delivery.py",
        "does not sample the disk that a map is said to be of",
        "            module.check(out.storage, had.map)\n",
        "",
        f"{_UPDATES}test_map_of_another_disk_is_refused[file-one map]",
    ),
    mutant(
        "importer/routes/delivery.py",
        "leaves the old map beside the new disk for a while",
        '        written.write(lazy.load(WRITE_MAP)(made), "write the map")\n',
        "",
        f"{_UPDATES}test_old_map_is_replaced_before_the_new_disk_is_usable[file-True]",
    ),
    mutant(
        "importer/audit.py",
        "writes the map of an update twice",
        " and each.map is not None and not self._request.maps_first:\n",
        " and each.map is not None:\n",
        f"{_UPDATES}test_old_map_is_replaced_before_the_new_disk_is_usable[file-True]",
    ),
    mutant(
        "importer/request.py",
        "leaves the old map beside a disk that is updated without it",
        '        return self.existing == "update" and self.write_map not in {"", targets.STDOUT}\n',
        '        return bool(self.have) and self.write_map not in {"", targets.STDOUT}\n',
        f"{_UPDATES}test_map_of_an_update_that_is_not_read_back_is_that_of_the_new_disk",
    ),
    mutant(
        "importer/routes/delivery.py",
        "leaves what waits for the rest of a range of the old map",
        "        attempt.outcome.old_map.end()\n",
        "        pass\n",
        f"{_UPDATES}test_disk_of_another_size[file-raw-22020096]",
    ),
    mutant(
        "images/sinks/oldmap.py",
        "does not sample the holes of the old map",
        "[*_sample(data), *_sample(zeros)]",
        "_sample(data)",
        "tests/images/sinks/test_oldmap.py::test_sample_has_holes",
    ),
    mutant(
        "images/sinks/oldmap.py",
        "takes what has arrived for what the old map has",
        "        if at == end and hashed.digest() == digest:\n",
        "        if at == end:\n",
        "tests/images/sinks/test_oldmap.py::test_only_ranges_that_differ_are_read",
    ),
    mutant(
        "images/sinks/oldmap.py",
        "takes what is behind the end of the old map for zeros",
        "            elif start < self._blocks.size:\n",
        "            elif True:\n",
        f"{_UPDATES}test_disk_of_another_size[block4096-raw-28311552]",
    ),
    mutant(
        "images/sinks/oldmap.py",
        "compares a part of a range with the checksum of all of it",
        "                if sum(map(_length, waiting)) >= end - start:\n",
        "                if True:\n",
        "tests/images/sinks/test_oldmap.py::test_updated_disk_is_the_new_one",
    ),
    mutant(
        "importer/result.py",
        "states the SHA-256 of a disk of which a part was not read",
        " or attempt.request.had)\n",
        ")\n",
        f"{_UPDATES}test_sha256_of_the_source_is_not_that_of_the_disk",
    ),
    mutant(
        "importer/execute.py",
        "keeps the wrong bytes of the first response",
        "            whole.engine.renewed = is_wrong = True\n",
        "            raise\n",
        f"{_IMPORTS}test_wrong_first_response_is_fetched_again",
    ),
    mutant(
        "importer/execute.py",
        "keeps the first response when ranges were wrong",
        "            is_wrong = isinstance(err, errors.WrongRanges) and request.blocks is not None\n",
        "",
        "tests/end_to_end/test_map_pairs.py::test_import_by_a_map_from_a_server_that_damages_a_range[5-once]",
    ),
    mutant(
        "importer/execute.py",
        "takes the beginning of another object for its own, without a map",
        "isinstance(err, errors.WrongRanges) and request.blocks is not None\n",
        "isinstance(err, errors.WrongRanges)\n",
        "tests/importer/test_survey.py::test_header_replaced_after_the_check_has_no_effect",
    ),
    mutant(
        "importer/execute.py",
        "fetches the first response again without an end",
        "            whole.engine.renewed = is_wrong = True\n",
        "            is_wrong = True\n",
        f"{_IMPORTS}test_disk_in_a_package_is_fetched_again[always]",
    ),
    mutant(
        "importer/execute.py",
        "examines an image again by the bytes that were wrong",
        "                whole, is_wrong = whole.renewed(run.reads), False\n",
        "                is_wrong = False\n",
        f"{_IMPORTS}test_wrong_first_response_is_fetched_again",
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
        f"{_UPDATES}test_update_moves_only_ranges_that_differ[file-ranges]",
    ),
    mutant(
        "formats/mapped/passing.py",
        "does not keep the last sector of compressed data in which the next begins",
        "max(start, span[0] - _SECTOR), min(end, span[1] + _SECTOR)",
        "max(start, span[0] - _SECTOR), span[1]",
        "tests/formats/qcow2/test_stream.py::test_compressed_data_that_ends_in_the_sector_of_the_next_is_kept",
    ),
)
