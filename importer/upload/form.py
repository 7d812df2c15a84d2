"""The file in a form upload (multipart/form-data, RFC 7578), as a stream."""

from __future__ import annotations

from collections.abc import Iterator

import multipart

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.sources import upload

#: Bytes that are parsed at once.
PIECE = 256 << 10


class FormFile(readers.RunsReader):
    """Reader of the part named ``file`` in the body of a form upload. ``kind``: the Content-Type of the body.

    Reading raises ``errors.RequestError`` if the form is malformed, truncated, or has no such part.
    """

    def __init__(self, kind: str, content: upload.Content) -> None:
        super().__init__(map(memoryview, self._file(kind)))
        self._content = content

    def interrupt(self) -> None:
        self._content.interrupt()

    def _file(self, content_type: str) -> Iterator[bytes | bytearray]:
        """Yield the file's bytes; read everything else to the end of the body and discard it."""
        kind, options = multipart.parse_options_header(content_type)
        if kind != "multipart/form-data" or not options.get("boundary"):
            raise errors.RequestError("a form upload needs Content-Type: multipart/form-data with a boundary")
        found = inside = False
        buffer = memoryview(bytearray(PIECE))
        try:
            with multipart.PushMultipartParser(options["boundary"]) as parser:
                while count := self._content.readinto(buffer):
                    for event in parser.parse(bytes(buffer[:count])) if not parser.closed else ():
                        if isinstance(event, multipart.MultipartSegment):
                            inside = event.name == "file" and not found
                            found = found or inside
                        elif event is not None and inside:
                            yield event
        except multipart.MultipartError as err:
            raise errors.RequestError(f"malformed form: {err}") from err
        if not found:
            raise errors.RequestError('the form has no part named "file"')
