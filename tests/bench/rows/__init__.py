"""The rows: each module declares some with ``bench.row``, and is found by itself."""

from __future__ import annotations

import importlib
import pkgutil

#: The modules in the order of the table; others follow by name.
_FIRST = ("disks", "packages", "targets", "sources", "vmware", "ovirt", "uploads", "verifying")
_NAMES = {module.name for module in pkgutil.iter_modules(__path__)}
for _name in (*_FIRST, *sorted(_NAMES - {*_FIRST})):
    importlib.import_module(f"{__name__}.{_name}")
