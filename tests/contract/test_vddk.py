"""A DataVolume of VMware without VMware's library: our image as ``initImageURL``."""

from __future__ import annotations

import pytest

from tests.support import processes, worker

#: Set by the kubelet in every container.
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
#: CDI mounts the volume for the library there.
MOUNTED = ("unshare", "--mount", "sh", "-euc", 'mount -t tmpfs tmpfs /opt; exec "$@"', "sh")


def test_init_container_of_our_image_ends_well() -> None:
    """CDI starts it without arguments, and the importer only when it has ended with 0."""
    processes.need_root()
    done = worker.run(env=KUBERNETES, prefix=MOUNTED)
    assert (done.status, done.output) == (0, "")
    assert done.error_message.startswith("copies nothing to /opt: this image has no VDDK library")


@pytest.mark.parametrize(
    ("arguments", "env", "prefix"),
    [
        ((), {}, MOUNTED),  # a person's machine
        ((), KUBERNETES, ()),
        # A controller's pod that lacks its variables: nothing was imported.
        (("-v=1",), KUBERNETES, MOUNTED),
    ],
)
def test_other_start_without_a_role_fails(
    arguments: tuple[str, ...], env: dict[str, str], prefix: tuple[str, ...]
) -> None:
    processes.need_root()
    done = worker.run(*arguments, env=env, prefix=prefix)
    assert (done.status, done.output.startswith("Usage: ")) == (2, True)
    # A role is never mistaken for it.
    done = worker.run(*arguments, env={**env, "IMPORTER_SOURCE": "nosuch"}, prefix=prefix)
    assert (done.status, "nosuch" in done.errors) == (1, True)
