"""What a later attempt believes of an earlier one, left unchecked."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "scratch/journal.py",
        "accepts a journal of another source or job",
        "    if not hmac.compare_digest(mac, _mac(key, body)):\n",
        "    if False:\n",
        "tests/scratch/test_journal.py::test_another_identity_or_size_starts_over",
    ),
    mutant(
        "scratch/journal.py",
        "goes on when the sync of the journal, in the disk's file, has failed",
        '                raise errors.target_error(os.path.realpath(slots.path), err, "sync") from err\n',
        "                raise\n",
        "tests/scratch/test_journal.py::test_sync_of_the_journal_that_fails_is_an_error_of_the_disk",
    ),
    mutant(
        "scratch/journal.py",
        "ends the import when a journal in its own file cannot be synced",
        "                if slots.is_apart:\n",
        "                if False:\n",
        "tests/scratch/test_journal.py::test_sync_that_fails_disables_a_journal_in_its_own_file",
    ),
    mutant(
        "scratch/journal.py",
        "writes both slots in one place: a torn write loses both",
        "slots.offset + self._sequence % 2 * SLOT",
        "slots.offset",
        "tests/scratch/test_journal.py::test_torn_write_keeps_the_older_state",
    ),
    mutant(
        "scratch/journal.py",
        "trusts the withheld head of a device",
        "        self._done.add(max(start, self._withheld), end)\n",
        "        self._done.add(start, end)\n",
        "tests/scratch/test_journal.py::test_withheld_start_is_never_done",
    ),
    mutant(
        "scratch/journal.py",
        "follows a link with the name of the incomplete disk",
        "os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW",
        "os.O_RDONLY | os.O_NONBLOCK",
        "tests/scratch/test_journal.py::test_link_is_not_followed",
    ),
    mutant(
        "scratch/digests.py",
        "trusts a granule of which a part was read back only",
        "return [] if is_complete and self._digest(tags) == record.tags",
        "return [] if self._digest(tags) == record.tags or not is_complete",
        "tests/scratch/test_digests.py::test_bytes_beyond_the_end_of_storage_differ",
    ),
    mutant(
        "scratch/space.py",
        "removes the folder to which a link with the name of scratch points",
        "    if folder.is_dir() and not folder.is_symlink():\n",
        "    if folder.is_dir():\n",
        "tests/scratch/test_space.py::test_planted_file_is_not_used",
    ),
    mutant(
        "scratch/journal.py",
        "accepts the journal of a disk of another size",
        '    if document["total"] != total:\n',
        "    if False:\n",
        "tests/scratch/test_journal.py::test_another_identity_or_size_starts_over",
    ),
    mutant(
        "scratch/journal.py",
        "takes the older of two slots",
        "            if sequence > self._sequence:\n",
        "            if True:\n",
        "tests/scratch/test_journal.py::test_torn_write_keeps_the_older_state",
    ),
    mutant(
        "scratch/digests.py",
        "keeps the digest of bytes that differ",
        (
            "            self._whole.pop(number, None)\n"
            "            if number in self._open:\n"
            "                self._open[number].clear(index, -(-(stop - start) // UNIT))\n"
        ),
        "            pass\n",
        "tests/scratch/test_digests.py::test_discarded_ranges_are_claimed_again_when_written",
    ),
    mutant(
        "sources/selection.py",
        "forgets the fields of a source, such as a tag or snapshot",
        "        if own != field.default and chosen != [] and about.selects and not about.secret:\n",
        '        if field.name == "endpoint":\n',
        "tests/sources/test_selection.py::test_field_selects_unless_it_is_a_credential",
    ),
    mutant(
        "sources/selection.py",
        "starts over when a password was changed",
        "    address = f\"{scheme}://{user.partition(':')[0]}{at}{server}{slash}{path}\"",
        "    address = endpoint",
        "tests/sources/test_selection.py::test_renewed_credential_in_an_address_selects_nothing",
    ),
    mutant(
        "scratch/journal.py",
        "samples a disk of zeros where it has no data",
        "for start in self._digests.places.starts:",
        "for start in ():",
        "tests/scratch/test_journal.py::test_sample_has_the_data_of_a_disk_that_is_mostly_zeros",
    ),
    mutant(
        "scratch/digests.py",
        "remembers only the first places with data",
        "elif (at := int(random.random() * self.of)) < PLACES:",
        "elif (at := PLACES) < PLACES:",
        "tests/scratch/test_journal.py::test_places_are_chosen_from_all_data",
    ),
    mutant(
        "scratch/journal.py",
        "notes ranges that were finished during the sync",
        (
            "            granules, units = self._digests.granules(), self._digests.units()\n"
            "            self._unsaved = 0\n"
            "            moved = self._moved\n"
            "            places = self._digests.places.of, list(self._digests.places.starts)\n"
        ),
        (
            "            self._unsaved = 0\n"
            "            moved = self._moved\n"
            "            places = self._digests.places.of, list(self._digests.places.starts)\n"
            "        flush()\n"
            "        with self._lock:\n"
            "            granules, units = self._digests.granules(), self._digests.units()\n"
            "        flush = lambda: None\n"
        ),
        "tests/scratch/test_journal.py::test_data_is_synced_before_the_journal",
    ),
    mutant(
        "scratch/journal.py",
        "fails an import whose journal cannot be stored",
        ("            self._slots = None\n        self._saved"),
        ("            raise\n        self._saved"),
        "tests/scratch/test_journal.py::test_missing_journal_file_is_ignored",
    ),
    mutant(
        "scratch/digests.py",
        "keeps any number of unfinished units in memory",
        (
            "        while len(self._edges) > _EDGES or self._buffers > _BUFFERS:\n"
            "            self._take_edge(next(iter(self._edges)))\n"
        ),
        "",
        "tests/scratch/test_digests.py::test_memory_of_partial_units_is_bounded",
    ),
    mutant(
        "scratch/space.py",
        "uses one folder for the disks of two jobs with the same name",
        "os.path.realpath(target).encode",
        "os.path.basename(target).encode",
        "tests/scratch/test_space.py::test_relative_targets_do_not_share_a_folder",
    ),
    mutant(
        "sources/selection.py",
        "takes a parameter of the object for one of a signature",
        "if needed <= names for name in names_of",
        "if needed & names for name in names_of",
        "tests/sources/test_selection.py::test_address_selects",
    ),
    mutant(
        "scratch/journal.py",
        "believes ranges without digests",
        "    if len(tags) < count * digests.TAG:\n",
        "    if False:\n",
        "tests/scratch/test_journal.py::test_invalid_body_with_valid_checksum_is_ignored",
    ),
)
