"""The SDK's connection to an engine, with answers that end and are plain XML. Importing it loads the SDK."""

from __future__ import annotations

import io
import types
from typing import Any, Final

import ovirtsdk4

from cdi_worker import errors
from cdi_worker.formats import smallxml

#: Bytes of the longest answer. A snapshot has about 2 KB, and a list has those of a storage domain.
LONGEST: Final = 32 << 20
#: What curl says of an answer that is not taken (CURLE_WRITE_ERROR).
REFUSED: Final = "23, '"


class _Buffer(io.BytesIO):
    """Takes an answer, also one that curl decompresses. The SDK has no limit."""

    def write(self, data: Any, /) -> int:
        return super().write(data) if self.tell() + len(data) <= LONGEST else 0


# The SDK makes its buffers in functions that are too long to replace.
ovirtsdk4.io = types.SimpleNamespace(BytesIO=_Buffer)


class Connection(ovirtsdk4.Connection):  # type: ignore[misc]  # without types
    def _read_reponse(self, context: Any) -> Any:
        """Return a response. Raises ``ValueError`` for XML that the SDK should not see.

        Its parser, libxml2, expands entities, and prints lines that it cannot parse, tickets included.
        """
        response = super()._read_reponse(context)
        if response.body and "xml" in (self._get_header_value(response.headers, "content-type") or ""):
            try:
                smallxml.parse(
                    response.body,
                    "answer",
                    lambda rule, reason: errors.Refused(format="answer", rule=rule, reason=reason),
                )
            except errors.Error as err:
                raise ValueError(str(err)) from err
        return response
