"""Which folders of the repository are which parts of the one installed package, ``cdi_worker``.

Everything else is in pyproject.toml, which cannot say "and all folders below".
"""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = {
    "cdi_worker": "importer",
    "cdi_worker.sources": "sources",
    "cdi_worker.images": "images",
    "cdi_worker.formats": "formats",
    "cdi_worker.scratch": "scratch",
}

#: Shell completions and man pages (make share), installed below the prefix.
SHARE = sorted(path for path in Path("share").rglob("*") if path.is_file())

setup(
    data_files=[(str(path.parent), [str(path)]) for path in SHARE],
    package_dir=FOLDERS,
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in (name, *(f"{name}.{below}" for below in find_packages(folder)))
    ],
)
