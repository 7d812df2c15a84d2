"""Register secrets, mask them in every text that leaves the process, and quote what servers say.

A secret is registered where it becomes known (``register``): a location when it is created, a token when a
source obtains it. It is replaced by ``***`` at the doors (``mask``, ``masked``): errors, log records, results
and reports. A message repeats the text of a server or an image through ``quoted``. No other place hides
anything.

A server may repeat a secret in another encoding. So the text is decoded, up to ``DEPTH`` times:
percent-encoding, HTML, the escapes of JSON and of Python's ``repr``, and characters between that are not
printable. After each step every secret is searched in plain and in base64, in any letter case, also in the
middle of longer base64, as in ``Authorization: Basic``.

Three things are not masked. A secret of fewer than ``SHORTEST`` characters: it would be found in any text. A
secret of letters and digits with fewer than ``WORD`` characters inside a longer word: ``a1b2`` must not hide
a part of a digest, or ``disk`` a part of a name. A word in one of the ``PHRASES``: controllers search for it.

It is one long module, because ``errors`` imports nothing else of the project.
"""

from __future__ import annotations

import binascii
import collections
import contextlib
import functools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

#: Stands for a secret.
MASK: Final = "***"
#: Characters of the shortest secret that is masked, and of the shortest word that is masked inside another.
SHORTEST, WORD = 4, 12
#: Characters of the shortest part of base64 that is searched.
_SHORTEST_PACKED = 6
#: Characters of the shortest value in a query that counts as a secret whatever its name.
_SHORTEST_VALUE = 8
#: How often a text is decoded.
DEPTH = 3
#: Characters of a text that are searched before it is cut: decoding all of a hostile one would take long.
_SEARCHED = 1 << 16
#: The most secrets of one owner. The most secrets kept after their owner is gone, because a traceback may be
#: logged late, and their characters.
OF_ONE, KEPT, KEPT_LENGTH = 64, 256, 1 << 18
#: Characters of a secret that are searched; the rest is ignored.
LONGEST = 1 << 16

#: What CDI's controllers search for in a message.
PHRASES: Final = (
    "Unable to process data",
    "Unable to connect to",
    "data source",
    "failed to pull image",
    "no space left on device",
    "disk quota exceeded",
    "checksum mismatch",
    "virtual image size",
    "is larger than the reported available storage",
    "A larger PVC is required",
    "Import Complete",
    "Upload Complete",
    "Clone Complete",
    "Preallocation applied",
    "Deadline Passed",
)
_FOLDED = tuple(each.lower() for each in PHRASES)

#: Headers, and fields of queries and forms, whose values are not secrets; in lower case.
_PUBLIC = frozenset((
    "accept", "accept-encoding", "account", "alt", "client_id", "connection", "content-length",
    "content-type", "expires", "generation", "grant_type", "host", "if-match", "prettyprint", "projection",
    "range", "scope", "service", "user-agent", "x-amz-algorithm", "x-amz-content-sha256", "x-amz-date",
    "x-amz-expires", "x-amz-signedheaders", "x-goog-algorithm", "x-goog-date", "x-goog-expires",
    "x-goog-signedheaders",
))  # fmt: skip
#: Names of fields whose values are secrets however short or ordinary they look.
_SECRET_NAME = re.compile(
    r"auth|credential|key|pass|pwd|secret|session|signature|ticket|token|^sig$", re.IGNORECASE
)
_SECRET_VARIABLE = re.compile(r"(passwo?r?d|secret|token|key)$", re.IGNORECASE)
_FILE_NAME = re.compile(r"[^?#]*\.[A-Za-z][A-Za-z0-9]{1,5}")
#: The schemes of addresses that are paths: an ``@`` is part of a name there.
PATHS: Final = frozenset({"file", "oci-archive", "nbd+unix"})
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")


class _Needle(NamedTuple):
    """A text to search, in lower case. ``is_word``: only where it is not a part of a longer word."""

    text: str
    is_word: bool


class _Registry:
    """The secrets by the ``id`` of their owner, and those kept after it. Thread-safe."""

    def __init__(self) -> None:
        # A finalizer may run in any thread at any time, also in one that holds the lock: then a dictionary
        # changes between two steps of Python.
        self._lock = threading.RLock()
        self._owned: dict[int, tuple[str, ...]] = {}
        self._kept: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._needles: list[_Needle] | None = []

    def add(self, owner: object, secrets: list[str]) -> None:
        with self._lock:
            key = id(owner)
            if key not in self._owned:
                self._owned[key] = ()
                weakref.finalize(owner, self._release, key).atexit = False
            if set(secrets) <= set(self._owned[key]):
                return
            earlier = (each for each in self._owned[key] if each not in secrets)
            owned = (*earlier, *dict.fromkeys(secrets))
            self._owned[key] = owned[-OF_ONE:]
            self._keep(owned[:-OF_ONE])
            self._needles = None

    def needles(self) -> list[_Needle]:
        """Return what to search."""
        needles = self._needles
        if needles is None:
            with self._lock:
                secrets = {each for owned in list(self._owned.values()) for each in owned} | set(self._kept)
                needles = self._needles = [*{each for secret in secrets for each in _forms(secret)}]
        return needles

    def _release(self, key: int) -> None:
        with self._lock:
            self._keep(self._owned.pop(key, ()))

    def _keep(self, secrets: tuple[str, ...]) -> None:
        for each in secrets:
            self._kept.pop(each, None)
            self._kept[each] = None
        while len(self._kept) > KEPT or sum(map(len, self._kept)) > KEPT_LENGTH:
            self._kept.popitem(last=False)
            self._needles = None


_registry = _Registry()


# -- registering ----------------------------------------------------------------------------------


def register(owner: object, *secrets: str) -> None:
    """Mask ``secrets`` while ``owner`` exists, and for a while longer: the latest ``OF_ONE`` of an owner."""
    maskable = [each[:LONGEST] for each in secrets if len(each) >= SHORTEST]
    if not maskable:
        return
    _registry.add(owner, maskable)
    # The program may have set another factory.
    if not isinstance(make := logging.getLogRecordFactory(), _MaskedRecords):
        logging.setLogRecordFactory(_MaskedRecords(make))


def login(user: str, password: str) -> tuple[str, ...]:
    """Return the secrets of a user name and a password: the password, and both as in Basic authorization."""
    return (password, f"{user}:{password}") if password else ()


def headers(fields: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the secrets of headers: whole values, and what follows a scheme or the name of a cookie."""
    for name, value in fields:
        if name.lower() in _PUBLIC:
            continue
        yield value
        scheme, _, packed = value.partition(" ")
        if scheme.lower() == "basic":
            with contextlib.suppress(binascii.Error):
                data = binascii.a2b_base64(packed)
                for text in {data.decode("utf-8", "replace"), data.decode("latin-1")}:
                    yield from (packed, *login(*text.partition(":")[::2]))
        # A token behind its scheme; cookies and parameters.
        first, *more = re.split(r"[\s,;]+", value)
        yield from (each for each in more if len(each) >= _SHORTEST_VALUE and "=" not in each)
        for pair in (first, *more):
            key, _, text = pair.partition("=")
            if _is_secret(key, text):
                yield text.strip('"')


def credentials(fields: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the secrets of headers that a library has added. Only names such as ``Authorization`` count."""
    return headers((name, value) for name, value in fields if name == "Cookie" or _SECRET_NAME.search(name))


def address(url: str) -> Iterator[str]:
    """Yield the secrets of an address: what is before its ``@``, and the values of its query."""
    info = user_info(url)
    for text in {info, _plain(info)} - {""}:
        user, colon, password = text.partition(":")
        yield text
        yield password if colon else user
        if re.search("[/?#@]", password):
            # Messages of parsers quote the parts of what they could not parse.
            yield from re.split("[/?#@]", password)
    found = _SCHEME.match(url)
    if found is None or found[1].lower() in PATHS:
        return
    query = url.partition("#")[0].partition("?")[2]
    for pair in re.split("[&;]", query) if query else ():
        name, _, value = pair.partition("=")
        if _is_secret(name, value):
            yield from (value, _plain(value), _plain(value.replace("+", " ")))


def user_info(url: str) -> str:
    """Return what is before the ``@`` of an address, as it is written; empty without one.

    A password may contain ``/``, ``?`` and ``#`` that are not encoded. Then the address has no host, or its
    port is not a number, and the result is everything before the last ``@``.
    """
    found = _SCHEME.match(url) if "@" in url else None
    if found is None or found[1].lower() in PATHS:
        return ""
    rest = url[found.end() :]
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        return authority.rpartition("@")[0]
    is_odd = "//" not in found[0] or not re.fullmatch(r"[^:]+(:\d*)?|\[[^\]]*\](:\d*)?", authority)
    return rest.rpartition("@")[0] if is_odd else ""


def repeated(url: str) -> Iterator[str]:
    """Yield the parts of an address that contains a secret: messages show a part, with half of the secret."""
    if mask(url) == url:
        return
    rest = url.partition("://")[2]
    host, slash, path = rest.partition("/")
    for part in (host, slash + path, slash + path.partition("#")[0]):
        yield from (part, _plain(part))


def form(body: object) -> Iterator[str]:
    """Yield the secrets of a request's body if it is a form."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    fields: Iterable[tuple[Any, Any]] = text.items() if isinstance(text, Mapping) else ()
    if isinstance(text, str) and "=" in text and not text.startswith("{"):
        pairs = (pair.partition("=") for pair in text.split("&"))
        fields = ((name, _plain(value.replace("+", " "))) for name, _, value in pairs)
    for name, value in fields:
        if _is_secret(str(name), str(value)):
            yield str(value)


def variables(env: Mapping[str, str]) -> Iterator[str]:
    """Yield the secrets of an environment: in variables with names such as ``TOKEN``, and in addresses."""
    for name, value in env.items():
        if _SECRET_VARIABLE.search(name):
            yield value
        yield from address(value)


def proxy(url: str) -> Iterator[str]:
    """Yield the secrets of the address of a proxy, whose scheme may be missing."""
    yield from address(url if "://" in url else f"http://{url}")


def _is_secret(name: str, value: str) -> bool:
    """Return whether the value of a query is to be masked: the name of a file is not."""
    if name.lower() in _PUBLIC or name.lower().startswith("response-content-"):
        return False
    if _SECRET_NAME.search(name):
        return True
    is_plain = value.isalpha() or value.isdigit() or _FILE_NAME.fullmatch(value)
    return len(value) >= _SHORTEST_VALUE and not is_plain


def _plain(text: str) -> str:
    """Return ``text`` without percent-encoding."""
    if "%" not in text:
        return text
    decoded = _PERCENT.sub(lambda found: chr(int(found[1], 16)), text)
    try:
        return decoded.encode("latin-1").decode()
    except UnicodeError:
        return decoded


# -- masking --------------------------------------------------------------------------------------


def mask(text: str) -> str:
    """Return ``text`` with ``***`` in place of each secret."""
    return _masked(text, len(text))


def quoted(text: str | bytes, longest: int = 80) -> str:
    """Return what a server or an image says, for a message: one printable line, masked and then cut.

    Names in images and archives may be invalid UTF-8 or contain terminal escapes.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    # A secret that begins in the first half ends in the second one.
    end = len(text) if len(text) <= _SEARCHED else _SEARCHED // 2
    shown = _masked(text[:_SEARCHED], end)
    if len(shown) > longest or end < len(text):
        shown = f"{shown[:longest]}…"
    if shown.isprintable():
        return shown
    # A message of several lines becomes one; U+FFFD is the replacement character.
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(shown.split()))


def _masked(text: str, most: int) -> str:
    """Return the first ``most`` characters, and a secret that begins there, masked."""
    needles = _registry.needles()
    spans = _spans(text, needles, DEPTH) if needles and text else []
    if not spans and most == len(text):
        return text  # it may be of a subclass, such as a fault that names an option
    parts: list[str] = []
    at = 0
    for start, end in sorted(spans):
        if parts and start <= at:
            at = max(at, end)
        elif start < most:
            parts += [text[at:start], MASK]
            at = end
    return "".join([*parts, text[at:most]])


def masked(value: Any) -> Any:
    """Return a JSON value with its strings masked; names of fields are not."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {name: masked(each) for name, each in value.items()}
    return [masked(each) for each in value] if isinstance(value, list | tuple) else value


@functools.lru_cache(KEPT)
def _forms(secret: str) -> tuple[_Needle, ...]:
    """Return the texts to search for a secret."""
    # A key in PEM form is many lines, and a server may repeat one of them.
    lines = {line for line in secret.splitlines() if len(line) > WORD and not line.startswith("-----")}
    found: set[str] = set()
    packed: set[str] = set()
    for text in {secret, "".join(filter(str.isprintable, secret)), *lines}:
        data = text.encode("utf-8", "surrogatepass")
        # http.client decodes headers as Latin-1. Some servers do the same, and repeat the result as UTF-8.
        wire = data.decode("latin-1")
        sent = (text, wire, wire.encode().decode("latin-1"))
        found |= {form for each in sent for form in (each, each.replace(" ", "+"))}
        variants = {data, text.encode("latin-1", "replace"), wire.encode()}
        packed |= {part for each in variants for part in _packed(each)}
    packed |= {part.replace("+", "-").replace("/", "_") for part in packed}
    plain = [each for each in map(_folded, found) if len(each) >= SHORTEST]
    needles = [_Needle(each, len(each) < WORD and each.isalnum()) for each in plain]
    encoded = [each for each in map(_folded, packed) if len(each) >= _SHORTEST_PACKED]
    return (*needles, *(_Needle(each, is_word=False) for each in encoded))


def _folded(text: str) -> str:
    """Return ``text`` in lower case, with as many characters.

    Of all characters only U+0130 has two in lower case, and only sigma depends on what follows it.
    """
    return text.replace("\u0130", "i").lower().replace("\u03c2", "\u03c3")


def _packed(data: bytes) -> Iterator[str]:
    """Yield the base64 characters that only ``data`` decides, for each offset of its first byte modulo 3."""
    for before in range(3):
        text = binascii.b2a_base64(bytes(before) + data, newline=False).decode()
        whole = (before + len(data)) * 8 // 6
        yield text[(0, 2, 3)[before] : whole]
    yield binascii.b2a_base64(data, newline=False).decode().rstrip("=")


def _spans(text: str, needles: list[_Needle], depth: int) -> list[tuple[int, int]]:
    """Return where secrets are in ``text`` and in what it decodes to."""
    folded = _folded(text)
    found = [span for each in needles if each.text in folded for span in _occurrences(folded, each)]
    if not depth:
        return found
    for codec in _CODECS:
        if codec.sign not in text:
            continue
        decoded = codec.pattern.sub(codec.decode, text)
        inner = _spans(decoded, needles, depth - 1) if decoded != text else []
        if inner:
            places = _places(codec, text)
            found += [(places[start][0], places[end - 1][1]) for start, end in inner]
    return found


def _occurrences(text: str, needle: _Needle) -> Iterator[tuple[int, int]]:
    wanted, at = needle.text, text.find(needle.text)
    while at >= 0:
        end = at + len(wanted)
        neighbours = text[at - 1 : at] + text[end : end + 1]
        is_part = any(each.isalnum() or each == "_" for each in neighbours)
        if not (needle.is_word and (is_part or _is_phrase(text, wanted, at))):
            yield at, end
        at = text.find(wanted, end)


def _is_phrase(text: str, word: str, at: int) -> bool:
    """Return whether the word at ``at`` belongs to one of ``PHRASES``."""
    return any(
        text.startswith(phrase, at - found.start())
        for phrase in _FOLDED
        for found in re.finditer(re.escape(word), phrase)
        if at >= found.start()
    )


class _Codec(NamedTuple):
    """An encoding of single characters, each of which begins with ``sign`` (empty: with any)."""

    sign: str
    pattern: re.Pattern[str]
    decode: Callable[[re.Match[str]], str]


def _places(codec: _Codec, text: str) -> list[tuple[int, int]]:
    """Return where each character of the decoded text is in ``text``: its start and its end."""
    places: list[tuple[int, int]] = []
    at = 0
    for found in codec.pattern.finditer(text):
        places += [(index, index + 1) for index in range(at, found.start())]
        places += [found.span()] * len(codec.decode(found))
        at = found.end()
    return places + [(index, index + 1) for index in range(at, len(text))]


def _html(found: re.Match[str]) -> str:
    if found[1]:
        return _character(int(found[1]))
    if found[2]:
        return _character(int(found[2], 16))
    import html

    return html.unescape(found[0])


#: Escapes of one letter in JSON and Python.
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a"}


def _escape(found: re.Match[str]) -> str:
    if found[1]:
        high, low = int(found[1], 16), int(found[2], 16)
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
    if found[3]:
        return _character(int(found[3][1:], 16))
    return _ESCAPES.get(found[4], found[4])


def _character(number: int) -> str:
    return chr(number) if number < 0x110000 else "\ufffd"


_PERCENT = re.compile("%([0-9A-Fa-f]{2})")
_CODECS = (
    _Codec("%", _PERCENT, lambda found: chr(int(found[1], 16))),
    _Codec("&", re.compile("&(?:#([0-9]{1,7})|#[xX]([0-9A-Fa-f]{1,6})|[A-Za-z][A-Za-z0-9]{1,31});"), _html),
    _Codec(
        "\\",
        re.compile(
            r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})"
            r"|(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})|([nrtbfva\"'\\/]))",
            re.IGNORECASE,
        ),
        _escape,
    ),
    # What is not printable is removed, or replaced, where a text is shown.
    _Codec("", re.compile("[^ -~]"), lambda found: found[0] if found[0].isprintable() else ""),
)


# -- log records --------------------------------------------------------------------------------

#: Our logger, and those of libraries that log what servers send: botocore logs its exceptions as warnings.
_LOGGERS: Final = frozenset({"cdi_worker", "botocore", "google", "keystoneauth", "requests", "urllib3"})
_formatter = logging.Formatter()


class _MaskedRecords:
    """Mask the log records of ``_LOGGERS`` as they are made, before any handler of the program gets them."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, name: str | None, *args: Any, **more: Any) -> logging.LogRecord:
        record = self._make(name, *args, **more)
        # ``logging.makeLogRecord`` has no name: the record was made, and masked, in another process.
        if not name or name.partition(".")[0] not in _LOGGERS:
            return record
        # A record with wrong arguments is reported where it is formatted.
        with contextlib.suppress(TypeError, ValueError, KeyError):
            message = record.getMessage()
            if (shown := mask(message)) != message:
                record.msg, record.args = shown, None
        if record.exc_info:
            text = _formatter.formatException(record.exc_info)
            if (shown := mask(text)) != text:
                # A formatter would format the exception again, with the secret.
                record.exc_info, record.exc_text = None, shown
        return record
