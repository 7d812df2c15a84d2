"""Every role on a machine without MD5 and SHA-1 for security: tests of each run again under that policy."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import policy, repository, shared

#: Files below ``tests/`` and the tests in them, by role.
ROLES = {
    "importer of files": """
        contract/test_importer.py disk_is_imported_to_file_system_volume disk_is_imported_to_block_volume
            archive_is_unpacked scratch_is_requested_and_used checksum_mismatch_is_final
        contract/test_http.py basic_auth_is_sent mounted_certificates_are_trusted proxies_are_used
            node_pull_imports_disk_and_labels
        importer/test_checksums.py checksums_of_request_and_server_are_both_verified
        end_to_end/test_registry.py image_is_imported_by_each_route
        end_to_end/test_oci_archives.py changed_disk_is_refused
        end_to_end/test_ova.py manifest_of_a_tool_is_verified wrong_disk_is_never_usable
        importer/metrics/test_metrics.py page_shows_progress_of_a_running_import
    """,
    "importer of objects": """
        end_to_end/test_objects.py image_is_imported_from_a_store
        sources/objects/test_s3_credentials.py credentials_of_a_web_identity_are_used
        sources/objects/test_gcs_credentials.py service_account_gets_a_token
    """,
    "importer of oVirt and KubeVirt": """
        end_to_end/test_imageio.py stages_of_a_migration_reproduce_each_checkpoint
        end_to_end/test_imageio_interrupted.py pod_requests_scratch
        sources/kubevirt/test_export.py pod_imports_a_stage
    """,
    "importer of VMware": """
        end_to_end/test_vddk.py pod_migrates_a_disk
        contract/test_vddk.py disk_of_a_running_machine_without_the_library job_of_a_manifest_imports_a_disk
        sources/vmware/test_lease.py disk_is_imported thumbprint_of_sha1_needs_another_trust
        end_to_end/test_lease_all.py four_disks_of_a_running_machine_are_read_at_once
    """,
    "importer and target of NBD": """
        sources/nbd/test_source.py disk_of_every_server_is_copied disk_is_copied_with_a_client_certificate
        end_to_end/test_nbd_targets.py export_over_tls
    """,
    "populators": """
        importer/commands/test_populators.py openstack_image_fills_a_device ovirt_disk_fills_a_file
    """,
    "poller": """
        importer/commands/test_cron.py new_digest_is_requested_once
    """,
    "upload server": """
        contract/test_upload.py every_path_accepts_an_upload other_clients_and_paths_are_refused
        importer/upload/test_life.py server_runs_as_a_process
    """,
    "clone": """
        importer/send/test_volume.py file_system_is_cloned_to_file_system device_is_cloned_to_device
            clone_resumes_after_cuts
    """,
    "signatures": """
        contract/test_signatures.py pod_imports_what_is_signed pod_refuses_what_is_not_signed
        contract/test_checksum_files.py detached_signature_is_accepted clear_signed_file_is_accepted
            signed_checksum_that_can_be_forged_is_refused
        sources/trust/test_cosign.py image_of_containers_image
    """,
}


def named(role: str) -> list[str]:
    """Return the tests of a role, as pytest names them."""
    found, path = [], ""
    for word in ROLES[role].split():
        if word.endswith(".py"):
            path = word
        else:
            found.append(f"tests/{path}::test_{word}")
    return found


@pytest.fixture(scope="session")
def variables(together: shared.Shared) -> dict[str, str]:
    """Build the policy; return the variables of a program under it."""
    return together.get("policy", lambda folder: contextlib.nullcontext(policy.make(folder)))


@pytest.mark.timeout(300)  # the first of a role starts its servers
@pytest.mark.parametrize("role", ROLES)
def test_role_works(role: str, variables: dict[str, str], pytestconfig: pytest.Config) -> None:
    folder = Path(variables["OPENSSL_CONF"]).parent
    # hypothesis itself uses SHA-1.
    options = [
        f"--policy={folder}",
        "-p",
        "no:hypothesispytest",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=short",
    ]
    if pytestconfig.getoption("--no-skips"):
        options.append("--no-skips")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *named(role)],
        cwd=repository.ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
