"""All mutants, by area. A new check of the product gets one here, beside its test."""

from __future__ import annotations

import importlib
import pkgutil

from tests.proofs.mutation.mutant import Mutant

#: The mutants of each module beside this one.
AREAS: dict[str, tuple[Mutant, ...]] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}").MUTANTS
    for found in pkgutil.iter_modules(__path__)
}
