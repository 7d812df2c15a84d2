"""JSON from outside."""

from __future__ import annotations

import json
import time

import pytest

from cdi_worker.formats import smalljson


@pytest.mark.parametrize(
    ("opening", "closing", "unique"),
    [("[", "]", False), ('{"a":', "}", False), ('{"a":', "}", True), ('[{"a":', "}]", True)],
)
def test_depth_is_limited(opening: str, closing: str, unique: bool) -> None:
    levels = opening.count("[") + opening.count("{")
    most = smalljson.DEEPEST // levels
    assert smalljson.parse(opening * most + "1" + closing * most, unique=unique)
    for count in (most + 1, 400, 900, 1100, 100_000):
        with pytest.raises(ValueError, match="levels of objects"):
            smalljson.parse(opening * count + "1" + closing * count, unique=unique)


@pytest.mark.parametrize("closed", [r'"[', r'"\"[', r'"\\\"[', r'"\\[', r'"\u0022['])
def test_brackets_in_strings_are_no_levels(closed: str) -> None:
    text = closed + "[" * 100 + '"'
    assert smalljson.parse(f"[{text}, {text}]") == [json.loads(text)] * 2


def test_levels_behind_a_string_of_escapes_are_counted() -> None:
    """The stack is not used up before they are refused: a finalizer may run at any depth."""
    for escaped in (r'"\""', r'"\\"', r'"\\\""'):
        with pytest.raises(ValueError, match="levels of objects"):
            smalljson.parse(f"[{escaped}, " + "[" * 100_000)


def test_time_is_linear() -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match="Unterminated"):
        smalljson.parse('"' + r"\"" * (1 << 20))
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("text", ["1", '"[["', "[]", "{}", "null", '{"a": "[", "b": []}'])
def test_documents_are_parsed(text: str) -> None:
    assert smalljson.parse(text) == smalljson.parse(text.encode(), unique=True)


@pytest.mark.parametrize("data", [b"", b"{", b"[]]", b"\xff", b'{"a": 1'])
def test_malformed_documents_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        smalljson.parse(data)


def test_repeated_names_are_refused_on_request() -> None:
    assert smalljson.parse('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="a name is repeated"):
        smalljson.parse('[{"a": 1, "a": 2}]', unique=True)
