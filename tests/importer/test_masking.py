"""Secrets are masked in every text that leaves the process, whatever a server makes of them."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gc
import html
import io
import json
import logging
import traceback
import urllib.parse
from collections.abc import Callable

import pytest
from pyVmomi import vim

from cdi_worker import errors, masking
from cdi_worker.sources import base, fields, wire
from cdi_worker.sources.nbd import locations as nbd
from cdi_worker.sources.objects import buckets

PASSWORD = "pa/s w\u00f6rd+&\"'<hunter2"
ENCODINGS = {
    "plain": str,
    "quote": urllib.parse.quote,
    "quote all": lambda text: urllib.parse.quote(text, safe=""),
    "quote plus": urllib.parse.quote_plus,
    "quote in lower case": lambda text: urllib.parse.quote_plus(text).lower(),
    "quote Latin-1": lambda text: urllib.parse.quote(text.encode("latin-1")),
    "html": html.escape,
    "json": json.dumps,
    "repr": repr,
    "repr of bytes": lambda text: repr(text.encode()),
    "on the wire": lambda text: text.encode().decode("latin-1"),
    "html of quote": lambda text: html.escape(urllib.parse.quote(text)),
    "quote of json": lambda text: urllib.parse.quote(json.dumps(text)),
    "json of html of quote": lambda text: json.dumps(html.escape(urllib.parse.quote(text))),
    "basic": lambda text: base64.b64encode(f"me:{text}".encode()).decode(),
    "base64, second place": lambda text: base64.b64encode(f"a{text}".encode()).decode(),
    "base64, third place": lambda text: base64.urlsafe_b64encode(f"ab{text}b".encode()).decode(),
    "lower case": str.lower,
    "upper case": str.upper,
    "basic in lower case": lambda text: base64.b64encode(f"me:{text}".encode()).decode().lower(),
    "html of lower case": lambda text: html.escape(text.lower()),
    "control characters": "\a".join,
    "soft hyphens": "\xad".join,
    "no-break spaces": "\xa0".join,
    "repr of control characters": lambda text: repr("\a".join(text)),
    "quote of control characters": lambda text: urllib.parse.quote("\a".join(text)),
}


class Owner:
    pass


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_secret_is_masked_in_every_encoding(owner: Owner, encoding: str) -> None:
    encoded = ENCODINGS[encoding](PASSWORD)
    assert masking.mask(encoded) == encoded
    masking.register(owner, *masking.login("me", PASSWORD))
    shown = masking.mask(f"before {encoded} after")
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    # What base64 mixes with its neighbours is left.
    assert masking.MASK in shown
    assert len(shown) <= len("before  after") + len(masking.MASK) + 9


@pytest.mark.parametrize(
    ("secret", "text", "shown"),
    [
        ("abc", "abc", "abc"),
        ("disk", "disk1 disks a disk.", "disk1 disks a ***."),
        ("space", "no space left on device: space", "no space left on device: ***"),
        ("a1b2", "sha256:00a1b2ff a1b2", "sha256:00a1b2ff ***"),
        ("pw-x", "apw-xb", "a***b"),
        ("Disk", "disk1 DISK a disk.", "disk1 *** a ***."),
        ("UNABLE", "Unable to process data: unable", "Unable to process data: ***"),
        ("pa\tss-word", "a pass-word p\aass-word", "a *** ***"),
        ("\u0130stan-\u03a3\u03a3", "x \u0130STAN-\u03c3\u03c2 y", "x *** y"),
    ],
)
def test_words_are_masked_as_words(owner: Owner, secret: str, text: str, shown: str) -> None:
    masking.register(owner, secret)
    assert masking.mask(text) == shown


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:SECRETpw@bucket/k",
        "s3://KEY:SECR/ETpw@bucket/k",
        "gs://KEY:SE@CRETpw@bucket/k",
        "nbd://user:SECRETpw/x@host",
        "nbds://user:a:SECRETpw@host/x",
        "https://SECRETpw@host/x",
        "http:/user:SECRETpw@host/x",
        "https://host/x?X-Amz-Signature=SECRETpw&file=a.img",
    ],
)
def test_address_is_shown_without_its_secrets(url: str) -> None:
    location = base.Location(url)
    assert "ETpw" not in wire.safe_url(url)
    assert "ETpw" not in repr(location)
    for parse in (nbd.parse, lambda text: buckets.parse(text, "s3", "")):
        with pytest.raises(errors.RequestError) as caught:
            parse(url)
        assert "ETpw" not in str(caught.value)


def test_secret_values_of_a_query_are_masked_wherever_they_are(owner: Owner) -> None:
    url = "https://host/d?X-Amz-Date=20261120T100000Z&X-Amz-Signature=hunter2&key=h%2Bu%2Bn&file=disk.img"
    masking.register(owner, *masking.address(url))
    shown = "https://host/d?X-Amz-Date=20261120T100000Z&X-Amz-Signature=***&key=***&file=disk.img"
    assert masking.mask(f"redirected to {url}") == f"redirected to {shown}"
    assert masking.mask("no object with h+u+n") == "no object with ***"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Foreign(base.Location):
    """A location of a third party, which does not call the ``__post_init__`` of ours."""

    pin: bytes = dataclasses.field(default=b"", repr=False)
    keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    token: str = fields.field(secret=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", f"{self.token}-changed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class More(Foreign):
    """Another below it, with none of its own."""


def _as_it_is(own: Callable[[Foreign], None]) -> Callable[[Foreign], None]:
    @functools.wraps(own)
    def same(self: Foreign) -> None:
        own(self)

    return same


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decorated(Foreign):
    """One whose own is decorated."""

    @_as_it_is
    def __post_init__(self) -> None:
        object.__setattr__(self, "token", f"{self.token}-changed")


@pytest.mark.parametrize("kind", [Foreign, More, Decorated])
def test_secrets_of_a_foreign_location_are_masked(kind: type[Foreign]) -> None:
    made = kind("https://me:pw-of-it@h/x", token="tok-of-it", pin=b"pin-of-it", keys=("key-1-of-it",))
    assert made.token == "tok-of-it-changed"
    assert masking.mask("tok-of-it-changed pin-of-it key-1-of-it pw-of-it") == "*** *** *** ***"


def test_address_with_a_doubtful_host_is_not_shown() -> None:
    assert wire.safe_url("https://user:a@SECRETpw/x@host/y") == "https://…"


def test_address_without_user_is_shown_whole() -> None:
    for url in ("docker://h:5000/r@sha256:12", "http://h:80/a@b.img", "file:///a/b@c.img"):
        base.Location(url)
        assert wire.safe_url(url) == masking.mask(url) == url


def test_errors_are_masked_before_they_are_cut(owner: Owner) -> None:
    secret = "s3cr-et-" * 20
    masking.register(owner, secret)
    assert "s3cr" not in masking.quoted("x" * 70 + secret)
    failure = errors.Unreachable(url="u", reason="x" * (errors.LONGEST - 20) + secret)
    assert "s3cr" not in f"{failure}{failure.fields}"
    assert errors.RequestError(secret).faults == ("***",)


@pytest.mark.parametrize("encode", [str, str.lower, "\a".join, urllib.parse.quote])
@pytest.mark.parametrize("longest", [80, errors.LONGEST])
def test_no_part_of_a_secret_is_quoted(owner: Owner, encode: Callable[[str], str], longest: int) -> None:
    """A long text is cut before all of it is decoded: the cut must not leave a part of a secret."""
    secret = "Zx9-Kq27Lm84Tr55Vb61Wn03Yp78"
    masking.register(owner, secret)
    # At each step of a short text, and of a long one at each distance of the cut from the secret's start.
    for before, many in [(step, 1) for step in range(120)] + [(step, 5000) for step in range(0, 140, 5)]:
        shown = masking.quoted("x" * before + encode(secret) * many, longest).lower()
        assert "zx9" not in shown, shown
        assert "yp78" not in shown, shown


def test_quoted_text_is_one_printable_line(owner: Owner) -> None:
    masking.register(owner, "hunter2-hunter2")
    assert masking.quoted("no\thunter2-\ahunter2\r\n\x1b[1mx") == "no *** \ufffd[1mx"
    assert masking.quoted("x" * 81) == "x" * 80 + "…"
    assert masking.quoted(b"caf\xe9", 4) == "caf\ufffd"


class Circle:
    """An owner that only the garbage collector ends."""

    def __init__(self) -> None:
        self.circle = self


def test_owner_may_be_collected_while_secrets_are_listed() -> None:
    held = Circle()
    thresholds = gc.get_threshold()
    try:
        # The collector starts after so many new objects: at each step of the search.
        for steps in range(80):
            gc.disable()
            for number in range(20):
                masking.register(Circle(), f"secret {steps} {number}")
            masking.register(held, f"latest {steps}")
            gc.set_threshold(gc.get_count()[0] + steps)
            gc.enable()
            assert masking.mask(f"the latest {steps}") == "the ***"
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


def test_memory_of_secrets_is_bounded() -> None:
    for number in range(1000):
        masking.register(Owner(), f"secret-number-{number}")
    gc.collect()
    assert masking.mask("secret-number-999 secret-number-0") == "*** secret-number-0"
    held = Owner()
    masking.register(held, "the-first-one")
    for number in range(1000):
        masking.register(Owner(), f"secret-again-{number}")
    assert masking.mask("the-first-one") == "***"


@pytest.mark.parametrize("name", ["", "cdi_worker", "cdi_worker.sources"])
def test_log_of_a_library_is_masked_with_its_tracebacks(owner: Owner, name: str) -> None:
    """Wherever the program has its handler, also if it makes its records itself."""
    make = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)
    masking.register(owner, PASSWORD)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger(name).addHandler(handler)
    try:
        raise ValueError(PASSWORD)
    except ValueError:
        logging.getLogger("cdi_worker.sources").exception("got %s", PASSWORD)
    finally:
        logging.getLogger(name).removeHandler(handler)
        logging.setLogRecordFactory(make)
    assert "hunter2" not in stream.getvalue()
    assert "got ***" in stream.getvalue()
    assert "ValueError: ***" in stream.getvalue()


def test_record_of_another_process_is_accepted(owner: Owner) -> None:
    """As the receiver of a ``SocketHandler`` or of a queue makes it, in a program that uses the library."""
    masking.register(owner, PASSWORD)
    record = logging.makeLogRecord({"name": "theirs", "msg": "%s left", "args": (3,)})
    assert (record.name, record.getMessage()) == ("theirs", "3 left")


def _denied() -> None:
    try:
        try:
            raise vim.fault.InvalidLogin(msg=f"{PASSWORD} is wrong")
        except vim.fault.InvalidLogin as err:
            raise vim.fault.NotFound(msg="nothing") from err
    except vim.fault.NotFound as err:
        raise errors.TargetExists(path="x", reason="denied") from err


def test_causes_of_a_library_that_refuses_attributes_are_masked(owner: Owner) -> None:
    """Exceptions of pyVmomi have the attributes that vSphere names, and no others."""
    masking.register(owner, PASSWORD)
    with pytest.raises(errors.TargetExists) as caught, errors.masked_causes():
        _denied()
    shown = "".join(traceback.format_exception(caught.value))
    assert PASSWORD not in shown
    assert "*** is wrong" in shown
