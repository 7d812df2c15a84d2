"""``python -m importer`` is ``cdi-worker``."""

from importer import cli

if __name__ == "__main__":
    cli.main()
