"""Check objects against JSON schemas; report every fault at once, with its path, in a plain sentence."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cdi_worker import errors

Path = tuple[str | int, ...]

QUANTITY = "is not a quantity such as 10Gi, 500M or 1e9"
#: The message for a value that breaks a keyword. {0}: the value, {1}: the keyword's value in the schema.
SENTENCES: Mapping[str, str] = {
    "const": "{0} is not {1}",
    "enum": "{0} is not one of {1}",
    "minLength": "missing",
    "string": "{0} is not a string; put it in quotes",
    "boolean": "{0} is neither true nor false",
    "object": "is not a mapping",
    "array": "is not a list",
    # In Kubernetes' schemas only quantities have either.
    "anyOf": f"{{0}} {QUANTITY}",
    "pattern": f"{{0}} {QUANTITY}",
}


def check(content: object, schema: Mapping[str, Any], faults: dict[str, str]) -> Any:
    """Return a copy of ``content`` without its faulty values; add each fault to ``faults``, by path.

    A null counts as an absent field, as in Kubernetes. The value of the schema's keyword ``check`` is a
    function that raises ``RequestError`` for a faulty string.
    """
    with errors.optional("checking manifests", package="jsonschema", extra="kubernetes"):
        import jsonschema

    def check_string(_: object, rule: Callable[[str], object], value: object, __: object) -> Iterator[Any]:
        try:
            if isinstance(value, str):
                rule(value)
        except errors.RequestError as err:
            yield jsonschema.ValidationError(str(err))

    extend: Any = jsonschema.validators.extend
    validator = extend(jsonschema.Draft202012Validator, {"check": check_string})(schema)
    copy: Any = _without_nulls(content)
    found: dict[Path, str] = {}
    for error in validator.iter_errors(copy):
        for path, sentence in _sentences(error):
            found.setdefault(path, sentence)
    for path, sentence in found.items():
        faults.setdefault(dotted(path), sentence)
    # Deepest and last first: the other paths stay valid.
    last: Any
    for *above, last in sorted(found, reverse=True):
        holder: Any = functools.reduce(operator.getitem, above, copy)
        if isinstance(holder, list) or last in holder:
            del holder[last]
    return copy


def dotted(path: Path) -> str:
    """Return a path as text: ``spec.checkpoints[0].current``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def shown(value: object) -> str:
    """Return a value for a message, cut to 60 characters."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _sentences(error: Any) -> Iterator[tuple[Path, str]]:
    path: Path = tuple(error.absolute_path)
    if error.validator == "required":
        yield from (
            ((*path, name), "missing") for name in error.validator_value if name not in error.instance
        )
    elif error.validator == "additionalProperties":
        known = sorted(error.schema.get("properties", ()))
        for name in error.instance:
            if name not in known:
                hint = f"; {errors.supported(name, known)}" if known else ""
                yield (*path, name), f"unknown field{hint}"
    elif error.validator == "check":
        yield path, error.message
    else:
        expected = error.validator_value
        keyword = expected if error.validator == "type" else error.validator
        sentence = SENTENCES.get(keyword, f"{{0}} is not valid: {keyword} is {{1}}")
        listed = ", ".join(expected) if error.validator == "enum" else expected
        hint = errors.did_you_mean(str(error.instance), expected) if error.validator == "enum" else ""
        yield path, f"{sentence.format(shown(error.instance), listed)}{'; ' if hint else ''}{hint}"


def _without_nulls(content: object) -> object:
    if isinstance(content, dict):
        return {name: _without_nulls(value) for name, value in content.items() if value is not None}
    return [_without_nulls(value) for value in content] if isinstance(content, list) else content
