"""Checks of archives that become files of a volume, left out."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "images/folder/staging.py",
        "lets an archive replace the lock file of its own run",
        "            if os.path.lexists(self.path / name):\n",
        "            if False:\n",
        "tests/images/folder/test_unpack.py::test_names_of_our_own_files_are_refused",
    ),
    mutant(
        "images/folder/staging.py",
        "empties another volume that is mounted below",
        " or any(mount.is_relative_to(path) for mount in mounts)",
        "",
        "tests/images/folder/test_staging.py::test_volume_is_emptied_except_for_mounts_below_it",
    ),
    mutant(
        "images/folder/staging.py",
        "lets a link become the disk of a volume",
        "            if not stat.S_ISREG((self.path / file.DISK).lstat().st_mode):\n",
        "            if False:\n",
        "tests/end_to_end/test_archive_disks.py::test_disk_that_is_not_a_file_is_refused",
    ),
    mutant(
        "images/folder/staging.py",
        "empties a folder that is not a volume of this job",
        ("    if not os.path.ismount(volume):\n        return\n"),
        "",
        "tests/images/folder/test_staging.py::test_folder_that_is_not_a_mount_is_not_emptied",
    ),
    mutant(
        "images/folder/staging.py",
        "replaces existing files of a folder without --force",
        "        elif os.path.lexists(final):\n",
        "        elif False:\n",
        "tests/images/folder/test_unpack.py::test_existing_files_are_refused_on_request",
    ),
    mutant(
        "images/folder/staging.py",
        "removes existing files before it knows that others can take their place",
        "            if err.errno not in _OCCUPIED:\n                raise\n",
        "            pass\n",
        "tests/images/folder/test_staging.py::test_file_behind_a_mount_point_is_not_removed",
    ),
)
