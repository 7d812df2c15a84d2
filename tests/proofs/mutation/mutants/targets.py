"""Checks of targets that are left out."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "images/targets/claim.py",
        "does not wait for the program that a killed run was starting",
        "max(terms.wait, _REMNANT)",
        "terms.wait",
        "tests/images/targets/test_claim.py::test_program_that_a_killed_run_was_starting_is_waited_for",
    ),
    mutant(
        "images/targets/base.py",
        "writes beyond the end of the device",
        "        if self._limit is not None and end > self._limit:\n",
        "        if False:\n",
        "tests/images/targets/test_block.py::test_stream_of_unknown_size_ends_with_the_device",
    ),
    mutant(
        "images/targets/__init__.py",
        "replaces a special file",
        "            if not stat.S_ISREG(os.lstat(path).st_mode):\n",
        "            if False:\n",
        "tests/images/targets/test_claim.py::test_special_file_is_never_replaced[False]",
    ),
    mutant(
        "images/targets/claim.py",
        "believes malformed notes in a lock file",
        "isinstance(entries, list) and len(entries) <= 2 and all(isinstance(each, str) for each in entries)",
        "True",
        "tests/images/targets/test_claim.py::test_lock_file_with_malformed_notes_is_taken_over",
    ),
    mutant(
        "images/targets/stream.py",
        "writes the end of a disk to a pipe before it is verified",
        (
            "        if sum(map(len, self._waiting)) >= _HELD:\n"
            "            self.drain()\n"
            "        self._waiting.append(data)"
        ),
        ("        self._waiting.append(data)\n        self.drain()"),
        "tests/importer/test_streams.py::test_wrong_checksum_leaves_the_disk_without_its_end",
    ),
    mutant(
        "images/targets/checkpoint.py",
        "keeps the old checkpoint where the new one cannot be stored",
        "            forget(path)\n",
        "            pass\n",
        "tests/images/targets/test_checkpoint.py::test_too_long_checkpoint_removes_the_old_one",
    ),
    mutant(
        "images/targets/group.py",
        "does not note what the disks of a package will be before the first is usable",
        "            self._claims[out.path].note(out.written_path)\n",
        "            pass\n",
        "tests/end_to_end/test_ova_together.py::test_same_command_succeeds_after_a_kill_between_the_renames",
    ),
    mutant(
        "images/targets/checkpoint.py",
        "applies a delta to a disk at another checkpoint",
        "        return bool(self.at & (previous | current))",
        "        return True",
        "tests/images/targets/test_checkpoint.py::test_delta_starts_at_the_checkpoint_of_the_disk",
    ),
    mutant(
        "images/targets/checkpoint.py",
        "applies an increment over another version of it",
        "        return bool(applied & current) and not _versions(applied) <= current\n",
        "        return False\n",
        "tests/images/targets/test_checkpoint.py::test_delta_starts_at_the_checkpoint_of_the_disk",
    ),
    mutant(
        "images/targets/__init__.py",
        "does not check the claim when a target is opened again",
        "        options.claim.check()\n",
        "        pass\n",
        "tests/images/targets/test_claim.py::test_stale_run_that_begins_again_removes_nothing",
    ),
    mutant(
        "images/targets/__init__.py",
        "writes a disk to memory where a device node has disappeared",
        ("    if not directory.is_dir() or _holds_devices(directory):\n        if"),
        ("    if not directory.is_dir():\n        if"),
        "tests/images/targets/test_open.py::test_missing_path_is_not_created",
    ),
    mutant(
        "images/targets/checkpoint.py",
        "applies another delta to a disk in the middle of one",
        "            return bool(self.at & previous and self.to & current)",
        "            return bool(self.at & previous)",
        "tests/images/targets/test_checkpoint.py::test_delta_starts_at_the_checkpoint_of_the_disk",
    ),
    mutant(
        "images/targets/__init__.py",
        "counts the blocks of a file with another name as free",
        " and status.st_nlink == 1 else 0",
        " else 0",
        "tests/images/targets/test_open.py::test_facts_count_leftovers_as_free",
    ),
    mutant(
        "images/targets/group.py",
        "makes the first of several disks usable before the others are durable",
        ("            out.prepare(size)\n        for out, _ in self._targets:\n            self._claims"),
        (
            "            out.prepare(size)\n"
            "            out.publish()\n"
            "        for out, _ in ():\n"
            "            self._claims"
        ),
        "tests/images/targets/test_group.py::test_disks_are_usable_after_publishing",
    ),
    mutant(
        "images/targets/checkpoint.py",
        "keeps the old checkpoint where it cannot be removed",
        (
            "        if err.errno not in _NONE:\n"
            '            raise errors.target_error(path, err, "remove the checkpoint") from err'
        ),
        "        return",
        "tests/images/targets/test_checkpoint.py::test_checkpoint_that_cannot_be_changed_is_an_error",
    ),
    mutant(
        "images/targets/__init__.py",
        "takes the incomplete disk of another run for a target",
        "    if file.is_reserved(path):\n",
        "    if False:\n",
        "tests/images/targets/test_claim.py::test_disk_with_the_name_of_an_incomplete_one_is_refused",
    ),
    mutant(
        "images/targets/claim.py",
        "lets two runs write to one file",
        "            if locked is False:\n",
        "            if False:\n",
        "tests/images/targets/test_claim.py::test_second_run_fails_and_names_the_first",
    ),
    mutant(
        "images/targets/claim.py",
        "takes any file with the name of a lock file for one, and overwrites it",
        "            if not _is_lock_file(fd):\n",
        "            if False:\n",
        "tests/images/targets/test_claim.py::test_file_of_another_program_is_not_a_lock_file",
    ),
    mutant(
        "images/targets/claim.py",
        "removes the lock file of the run that has taken the disk over",
        "            is_ours = self.lost is None and self._taken() is None\n",
        "            is_ours = True\n",
        "tests/images/targets/test_claim.py::test_stale_run_does_not_remove_the_left_over_of_its_replacement",
    ),
    mutant(
        "images/targets/claim.py",
        "opens a device that is mounted or used by another run",
        "os.O_RDWR | os.O_EXCL | os.O_NONBLOCK",
        "os.O_RDWR | os.O_NONBLOCK",
        "tests/images/targets/test_claim.py::test_busy_device_names_the_run",
    ),
    mutant(
        "images/targets/claim.py",
        "does not look for another run's record on a device",
        ("        if not self._expected:\n            return None\n"),
        "        return None\n",
        "tests/images/targets/test_claim.py::test_stale_run_on_another_machine_stops",
    ),
    mutant(
        "images/targets/block.py",
        "begins a refresh of a head that another run has written",
        "        self.storage.require_unchanged()\n        self.storage.withhold()\n",
        "        self.storage.withhold()\n",
        "tests/images/targets/test_claim.py::test_stale_refresh_does_not_begin[taken]",
    ),
    mutant(
        "images/targets/block.py",
        "looks only at the first sector of a device that is compared",
        "                self.storage.require_unchanged()\n",
        "                pass\n",
        "tests/images/targets/test_claim.py::test_stale_refresh_that_found_no_difference_does_not_succeed[True]",
    ),
    mutant(
        "images/targets/file.py",
        "leaves the name of a disk that needs no change to the next power cut",
        "            # A run that was killed between its rename and the sync may have left it.\n"
        "            kernel.sync_directory(self._directory)\n",
        "            pass\n",
        "tests/images/targets/test_file.py::test_refresh_without_a_change_makes_the_name_durable",
    ),
    mutant(
        "images/targets/block.py",
        "looks at the head of a device while another thread begins to change it",
        "        with self._lock:  # another thread may begin\n",
        "        if True:\n",
        "tests/images/targets/test_block.py::test_refresh_is_not_lost_to_a_thread_of_its_own",
    ),
    mutant(
        "images/targets/block.py",
        "expects nothing on a device that is compared",
        "        self._device.expect(bytes(self.head[: claim.RECORD]))\n",
        "",
        "tests/images/targets/test_claim.py::test_stale_refresh_ends_while_it_compares",
    ),
    mutant(
        "sources/nbd/writer.py",
        "goes on with a server that was restarted",
        "                if each.dead:\n",
        "                if False:\n",
        "tests/end_to_end/test_nbd_targets.py::test_server_that_is_restarted_between_two_requests",
    ),
    mutant(
        "sources/nbd/writer.py",
        "overlooks a flush that failed",
        '            self._check(used, used.flush(), "flushing")\n',
        "            used.flush()\n",
        "tests/sources/nbd/test_hostile_targets.py",
    ),
    mutant(
        "sources/nbd/writer.py",
        "writes to a server that cannot flush",
        "        if self._writable and not made.can_flush:\n",
        "        if False:\n",
        "tests/end_to_end/test_nbd_targets.py::test_export_that_cannot_be_written_safely",
    ),
    mutant(
        "sources/nbd/writer.py",
        "loses what is beside a part of a block",
        "            whole = bytearray(self.read(start, self.unit))\n",
        "            whole = bytearray(self.unit)\n",
        "tests/end_to_end/test_nbd_targets.py::test_parts_of_blocks_keep_what_is_beside_them",
    ),
)
