"""``python -m cdi_worker`` is ``cdi-worker``."""

from cdi_worker.importer import cli

if __name__ == "__main__":
    cli.main()
