"""Checks of disks that are left out."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "formats/compressed/decompress.py",
        "_at_end: does not check not more or (padding and (not self._kind.resumes))",
        "        if not more or (padding and not self._kind.resumes):\n",
        "        if False:\n",
        "tests/formats/compressed/test_decompress.py::test_bytes_after_the_end_are_garbage[x-gz]",
    ),
    mutant(
        "formats/qcow2/header.py",
        "_version_3: does not check autoclear & _RAW_DATA_FILE",
        "    if autoclear & _RAW_DATA_FILE:\n",
        "    if False:\n",
        "tests/formats/qcow2/test_header.py::test_contradictory_fields_are_corrupt[fields15]",
    ),
    mutant(
        "formats/qcow2/header.py",
        "_version_3: does not check features & _CORRUPT",
        "    if features & _CORRUPT:\n",
        "    if False:\n",
        "tests/formats/qcow2/test_header.py::test_contradictory_fields_are_corrupt[fields0]",
    ),
    mutant(
        "formats/qcow2/header.py",
        "parse: does not check crypt",
        "    if crypt:\n",
        "    if False:\n",
        "tests/formats/qcow2/test_header.py::test_unsafe_feature_is_refused[fields1-encryption]",
    ),
    mutant(
        "formats/qcow2/header.py",
        "parse: does not check len(head) < _V2.size",
        "    if len(head) < _V2.size:\n",
        "    if False:\n",
        "tests/formats/qcow2/test_header.py::test_cut_header_is_truncated[0]",
    ),
    mutant(
        "formats/qcow2/layout.py",
        "share: does not check self._taken.find(self._WHOLE, first, end) >= 0",
        "        if self._taken.find(self._WHOLE, first, end) >= 0:\n",
        "        if False:\n",
        "tests/formats/qcow2/test_tables.py::test_malformed_l2_entry_is_corrupt[entries13-twice]",
    ),
    mutant(
        "formats/vdi.py",
        "check: does not check header.type not in _TYPES or any(header.linked) or any(head...",
        "    if header.type not in _TYPES or any(header.linked) or any(header.parent):\n",
        "    if False:\n",
        "tests/formats/test_safety.py::test_hostile_image_is_refused[vdi-differencing]",
    ),
    mutant(
        "formats/vhdx.py",
        "_table: does not check found != magic or count > _MAX_ENTRIES",
        "    if found != magic or count > _MAX_ENTRIES:\n",
        "    if False:\n",
        "tests/formats/test_safety_fields.py::test_patched_field_is_refused[vhdx-region]",
    ),
    mutant(
        "formats/vhdx.py",
        "check: does not check disk.sector_size not in {512, 4096} or disk.virtual_size % ...",
        "    if disk.sector_size not in {512, 4096} or disk.virtual_size % disk.sector_size:\n",
        "    if False:\n",
        "tests/formats/test_safety_fields.py::test_contradictory_vhdx_size_is_refused[2442a52f1bcd7648b2115dbed83bf4b8-<Q-8388613]",
    ),
    mutant(
        "formats/vmdk/header.py",
        "parse_footer: does not check wrong",
        ('        if wrong:\n            raise facts.refuse("vmdk", "footer", reason)\n'),
        ('        if False:\n            raise facts.refuse("vmdk", "footer", reason)\n'),
        "tests/formats/vmdk/test_tables_last.py::test_malformed_footer_is_refused[12-<Q-8]",
    ),
    mutant(
        "formats/vmdk/markers.py",
        "_compare: does not check footer.overhead * SECTOR > end",
        "        if footer.overhead * SECTOR > end:\n",
        "        if False:\n",
        "tests/formats/vmdk/test_tables_last.py::test_footer_beyond_the_end_is_truncated",
    ),
    mutant(
        "formats/vmdk/markers.py",
        "_grain: does not check rest or sector >= header.capacity or at // SECTOR >> 32",
        "        if rest or sector >= header.capacity or at // SECTOR >> 32:\n",
        "        if False:\n",
        "tests/formats/vmdk/test_tables_first.py::test_contradiction_of_markers_and_tables_needs_scratch[marker]",
    ),
    mutant(
        "formats/vmdk/markers.py",
        "_metadata: does not check self._blocks < 0",
        "            if self._blocks < 0:\n",
        "            if False:\n",
        "tests/formats/vmdk/test_tables_last.py::test_too_many_tables_need_scratch",
    ),
)
