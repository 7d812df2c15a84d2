"""``cdi-worker`` and ``python -m cdi_worker``."""

from __future__ import annotations

from typing import NoReturn

from cdi_worker import collector


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    with collector.pause():
        from cdi_worker.importer import cli
    cli.main()


if __name__ == "__main__":
    main()
