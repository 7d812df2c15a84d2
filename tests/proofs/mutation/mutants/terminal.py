# ruff: noqa: E501 - lines of the product
"""What people see and read: progress, output, help, and what a page says."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "importer/inspection.py",
        "plans an import to a device that is in use",
        "        with targets.take(request.target) as claim:\n            destination.check_replaceable(claim, request)\n",
        "        pass\n",
        "tests/end_to_end/test_existing.py::test_mounted_device_is_never_written",
    ),
    mutant(
        "importer/commands/bar.py",
        "wraps a bar that is too long",
        '        return f"{numbers.phase:>8} {bar}{text}"[: columns - 1]\n',
        '        return f"{numbers.phase:>8} {bar}{text}" + " " * columns\n',
        "tests/importer/test_tmux.py::test_bar_is_one_line_and_leaves_nothing",
    ),
    mutant(
        "importer/progress.py",
        "estimates the time left from the first piece",
        "        return len(self._points) > 2 and self._points[-1][0] - self._points[1][0] >= SAMPLE\n",
        "        return True\n",
        "tests/importer/test_tmux.py::test_time_left_after_a_resume_is_that_of_this_run",
    ),
    mutant(
        "importer/cli.py",
        "writes a disk to a closed standard output, with success",
        "enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY))",
        "enumerate((os.O_RDWR, os.O_RDWR, os.O_RDWR))",
        "tests/importer/test_tmux.py::test_disk_is_not_written_to_a_closed_standard_output",
    ),
    mutant(
        "cdi_worker/version.py",
        "does not find its version",
        "                if name.startswith(prefix) and name.endswith(suffix):\n",
        "                if False:\n",
        "tests/importer/test_cli.py::test_version_is_printed",
    ),
    mutant(
        "cdi_worker/units.py",
        "rounds the usable space down",
        "    return -(-available * whole // (whole + part)) // MIB * MIB\n",
        "    return available * whole // (whole + part) // MIB * MIB\n",
        "tests/importer/test_units.py",
    ),
)
