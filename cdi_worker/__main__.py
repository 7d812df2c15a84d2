"""``cdi-worker`` and ``python -m cdi_worker``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from cdi_worker import lazy


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    with lazy.start():
        run: Callable[[], NoReturn] = lazy.load("cdi_worker.importer.cli:main")
    run()


if __name__ == "__main__":
    main()
