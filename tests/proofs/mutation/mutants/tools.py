"""Checks of programs and their temporary directories, left out."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "images/tools/process.py",
        "lets a program live after the worker was killed",
        ', "setpriv", "--pdeathsig", "KILL", "--")',
        ', "env", "--")',
        "tests/images/tools/test_process.py::test_program_dies_with_its_killed_parent",
    ),
    mutant(
        "images/tools/process.py",
        "does not kill a program that ignores SIGTERM",
        "((signal.SIGTERM, _GRACE), (signal.SIGKILL, None))",
        "((signal.SIGTERM, _GRACE),)",
        "tests/images/tools/test_process.py::test_program_ignoring_sigterm_is_killed",
    ),
    mutant(
        "images/tools/workspace.py",
        "leaves what killed runs have left",
        "        _sweep(parent)\n",
        "",
        "tests/images/tools/test_workspace.py::test_directory_of_a_killed_process_is_removed",
    ),
    mutant(
        "images/tools/workspace.py",
        "removes the directory of a run that is alive",
        "    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n    log.info",
        "    log.info",
        "tests/images/tools/test_workspace.py::test_directory_of_a_running_process_stays",
    ),
    mutant(
        "images/tools/workspace.py",
        "removes a directory that is not ours alone",
        (
            "    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != stat.S_IRWXU:\n"
            "        return\n"
        ),
        "",
        "tests/images/tools/test_workspace.py::test_what_is_not_ours_is_not_removed",
    ),
    mutant(
        "images/tools/workspace.py",
        "uses a directory that was removed before it was locked",
        ("        if os.path.samestat(os.fstat(fd), os.lstat(path)):\n            return fd\n"),
        "        return fd\n",
        "tests/images/tools/test_workspace.py::test_directory_that_is_removed_before_it_is_locked_is_not_used",
    ),
    mutant(
        "images/tools/process.py",
        "gives a program the worker's environment",
        'env={**_ENVIRONMENT, "HOME"',
        'env={**os.environ, **_ENVIRONMENT, "HOME"',
        "tests/images/tools/test_process.py::test_environment_is_not_inherited",
    ),
    mutant(
        "images/tools/process.py",
        "takes the exit status of a failed program for a success",
        "        if self._popen.wait():\n",
        "        if False:\n",
        "tests/images/tools/test_process.py::test_address_space_is_limited",
    ),
)
