"""A program that imports with the library: its log and its traceback are Python's, and mask no secret.

Arguments: the volume and the folder of secret headers. The environment is that of a pod.
"""

from __future__ import annotations

import logging
import sys
import traceback

import cdi_worker
from cdi_worker.importer import contract
from cdi_worker.importer.roles import importer


def main(data: str, headers: str) -> None:
    """Import as a pod would, log everything, and print the exception."""
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    access = {"patience": 1}
    paths = contract.Paths(data=data, block=f"{data}/none", extra_headers=headers, access=access)
    try:
        wanted = importer.read(contract.environment(), paths)
        print(wanted, cdi_worker.inspect(wanted))
        print(cdi_worker.run(wanted))
    except cdi_worker.Error as err:
        print(err, repr(err), err.fields, err.as_fields())
        traceback.print_exc()
        logging.getLogger("program").exception("failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
