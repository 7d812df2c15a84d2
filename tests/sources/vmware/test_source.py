"""Messages of VDDK are parsed."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.vmware import locations, nbdkit, source, vddk
from tests.support import repository


def test_version_and_host_are_reported() -> None:
    log = vddk.Log("disk")
    log.line("nbdkit: debug: VMware VixDiskLib (7.0.3) Release build-18705163")
    log.line(
        "nbdkit: vddk[1]: debug: DISKLIB-LINK  : Opened 'vpxa-nfcssl://[a@b] test/test.vmdk@esx15.lan:902'"
        " (0xa): custom, 50331648 sectors / 24 GB."
    )
    assert log.info == {"Version": "7.0.3", "Host": "esx15.lan"}


def test_late_message_is_waited_for() -> None:
    log = vddk.Log("disk")
    threading.Timer(0.05, log.line, ["nbdkit: vddk[1]: error: VixDiskLib_Open: Out of memory"]).start()
    found = log.explain(errors.Transient(url="disk", reason="reset"))
    assert isinstance(found, errors.Transient)
    assert str(found) == "disk: reset (VDDK: VixDiskLib_Open: Out of memory)"


def test_missing_plugin_is_not_taken_for_the_library() -> None:
    """It is installed in the image, the library by the administrator."""
    log = vddk.Log("disk")
    plugin = nbdkit.Plugin("nosuchplugin", debug=source.DEBUG, package="nbdkit-plugin-vddk")
    with pytest.raises(errors.ToolFailed) as caught, nbdkit.serve(plugin, nbdkit.Follow(on_line=log.line)):
        pass
    found = log.explain(caught.value)
    expected = "disk: nbdkit cannot load its plugin vddk; install nbdkit-plugin-vddk (VDDK: "
    assert str(found).startswith(expected)


def test_reads_failing_together_have_the_same_message() -> None:
    log = vddk.Log("disk")
    log.line("nbdkit: vddk[1]: error: VixDiskLib_Read: Unknown error")
    for _ in range(2):
        found = log.explain(errors.Transient(url="disk", reason="reset"))
        assert str(found) == "disk: reset (VDDK: VixDiskLib_Read: Unknown error)"


def test_secret_in_a_message_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    location = locations.Vddk("https://localhost", base.Access("user", "hunter2"))
    log = source.VddkSource(location, cancelling.NEVER)._vddk
    ended = errors.ToolFailed(tool="nbdkit", exit_status=1, reason="cannot log in with hunter2")
    assert "hunter2" not in str(log.explain(ended))
    log.line("nbdkit: vddk[1]: error: cannot use hunter2")
    assert "hunter2" not in str(log.explain(errors.Transient(url="disk", reason="reset")))
    log.ended(ended, False)
    assert "with ***" in str(log.explain(errors.Transient(url="disk", reason="reset")))
    assert "hunter2" not in caplog.text


WITHOUT = """
import sys
sys.modules["pyVmomi"] = None
import cdi_worker
from cdi_worker import errors
from cdi_worker.sources.vmware import locations
location = locations.Vddk("https://localhost", uuid="u", backing_file="f", vddk_libdir=sys.argv[1])
try:
    cdi_worker.run(cdi_worker.Request(source="vddk", location=location, target=f"{sys.argv[1]}/disk.img"))
except errors.MissingExtra as err:
    print(err)
"""


def test_missing_pyvmomi_is_named(tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libvixDiskLib.so.8").touch()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, tmp_path],
        cwd=repository.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "[vddk]'" in done.stdout
