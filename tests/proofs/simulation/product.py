"""Load the product a second time, on top of simulated modules.

The real modules of the product run unchanged; only what they import is different: the modules that reach the
kernel are simulated, and the modules of the standard library that use these in Python are loaded again, too.
Nothing of the process is replaced: the modules loaded here are separate from those in ``sys.modules``.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Standard library in Python that uses ``threading``, ``time`` or ``os``.
AGAIN = ("concurrent", "concurrent.futures", "pathlib", "posixpath", "genericpath", "queue", "uuid")
#: Faster versions in C, which use real threads.
WITHOUT = frozenset({"_queue"})

#: Changes of modules: by path in the tree, texts to replace and their replacements.
Edits = Mapping[str, Mapping[str, str]]

_code: dict[Path, types.CodeType] = {}


class Product:
    """The modules of the product in ``root``. ``simulated``: the modules that they get instead of real ones.

    ``name``: prefix of the names in ``sys.modules``, where dataclasses look up annotations. ``edits``:
    changes of the modules while they are loaded.
    """

    def __init__(
        self, root: Path, name: str, simulated: Mapping[str, types.ModuleType], edits: Edits | None = None
    ) -> None:
        self._root = root
        self._edits = {root / path: edit for path, edit in (edits or {}).items()}
        self._name = name
        self._modules: dict[str, types.ModuleType] = {**simulated, "importlib": types.ModuleType("importlib")}
        # A kind of source is named by a reference, as in cdi_worker.sources.
        self._modules["importlib"].__dict__["import_module"] = lambda name: self.load(
            name.removeprefix(f"{self._name}.")
        )
        self._builtins = {**vars(builtins), "__import__": self._import}
        simulated["os"].__dict__["path"] = self._modules["os.path"] = self.load("posixpath")

    def load(self, name: str) -> Any:
        """Return a module."""
        found = self._modules.get(name)
        if found is not None:
            return found
        if name in WITHOUT:
            raise ImportError(name)
        parent, _, last = name.rpartition(".")
        if parent:
            above = self.load(parent)
            if name in self._modules:
                return self._modules[name]
        path = self._path(name)
        made = importlib.import_module(name) if path is None else self._execute(name, path)
        if parent and path is not None:
            setattr(above, last, made)
        return made

    def _path(self, name: str) -> Path | None:
        """Return the source of a module that is loaded again."""
        top, _, rest = name.partition(".")
        if top == "cdi_worker":
            parts = rest.split(".")
            # What is not in a folder of the repository is in the package itself; the folders are links in it.
            folder = self._root if (self._root / parts[0]).is_dir() and rest else self._root / "cdi_worker"
            within = folder.joinpath(*parts)
            for path in (within / "__init__.py", within.with_suffix(".py")):
                if path.is_file():
                    return path
            raise ModuleNotFoundError(name, name=name)
        if name in AGAIN or name.rpartition(".")[0] in AGAIN:
            return Path(str(importlib.import_module(name).__file__))
        return None

    def _execute(self, name: str, path: Path) -> types.ModuleType:
        is_package = path.name == "__init__.py"
        made = types.ModuleType(f"{self._name}.{name}")
        made.__dict__.update(
            __file__=str(path),
            __builtins__=self._builtins,
            __package__=name if is_package else name.rpartition(".")[0],
        )
        if is_package:
            made.__path__ = [str(path.parent)]
        self._modules[name] = sys.modules[made.__name__] = made
        try:
            exec(self._compiled(path), made.__dict__)
        except BaseException:
            del self._modules[name], sys.modules[made.__name__]
            raise
        return made

    def _import(
        self,
        name: str,
        names: Mapping[str, Any] | None = None,
        _locals: object = None,
        wanted: tuple[str, ...] = (),
        level: int = 0,
    ) -> types.ModuleType:
        """See ``builtins.__import__``."""
        if level:
            package = (names or {})["__package__"].split(".")
            name = ".".join([*package[: len(package) - level + 1], *([name] if name else [])])
        made = self.load(name)
        if not wanted:
            return self.load(name.partition(".")[0])
        for each in wanted:
            if hasattr(made, "__path__") and not hasattr(made, each) and each != "*":
                try:
                    setattr(made, each, self.load(f"{name}.{each}"))
                except ModuleNotFoundError as err:
                    # Not a module but an attribute, unless what is missing is a module that it imports.
                    if err.name != f"{name}.{each}":
                        raise
                    continue
        return made

    def _compiled(self, path: Path) -> types.CodeType:
        if path in self._edits:
            source = path.read_text()
            for old, new in self._edits[path].items():
                assert source.count(old) == 1, f"{path}: not found exactly once: {old}"
                source = source.replace(old, new)
            return compile(source, str(path), "exec", dont_inherit=True)
        if path not in _code:
            _code[path] = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        return _code[path]
