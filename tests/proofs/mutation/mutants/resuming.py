"""What a later attempt believes of an earlier one, left unchecked."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
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
        "follows a link with the name of the incomplete disk",
        "os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW",
        "os.O_RDONLY | os.O_NONBLOCK",
        "tests/scratch/test_journal.py::test_link_is_not_followed",
    ),
    mutant(
        "scratch/space.py",
        "removes the folder to which a link with the name of scratch points",
        "    if folder.is_dir() and not folder.is_symlink():\n",
        "    if folder.is_dir():\n",
        "tests/scratch/test_space.py::test_planted_file_is_not_used",
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
        "fails an import whose journal cannot be stored",
        ("            self._slots = None\n        self._saved"),
        ("            raise\n        self._saved"),
        "tests/scratch/test_journal.py::test_missing_journal_file_is_ignored",
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
)
