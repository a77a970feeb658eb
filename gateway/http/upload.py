"""Reading of a multipart body: a file, written to disk as it arrives, and a few short fields."""

import asyncio
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fastapi import Request
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from penstock.schemas.errors import BodyTooLarge, Cancelled, InvalidJob, UnreadableBody

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
MAX_HEADER_BYTES = 1024  # a part's head, or the body's content type: parsing takes quadratic time
BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")  # RFC 2046
ROOM_BYTES = 64 * 1024  # for boundaries, headers and fields


@dataclass(slots=True, eq=False)
class Upload:
    """The parts received so far. That named `field_name` goes to `sink`; other parts are fields."""

    sink: BinaryIO
    field_name: str
    filename: str = ""
    num_bytes: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _header: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))
    _name: str = ""
    _value: bytearray | None = None  # None while the file's bytes arrive
    _num_parts: int = 0
    _content_digest: "hashlib.blake2b" = field(default_factory=hashlib.blake2b)

    def parser(self, content_type: str) -> MultipartParser:
        kind, options = parse_options_header(content_type[:MAX_HEADER_BYTES].encode("latin-1"))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not BOUNDARY.fullmatch(boundary):
            raise InvalidJob("content-type: send multipart/form-data with a file")
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._begin_content,
                "on_part_data": self._content,
                "on_part_end": self._end,
            },
        )

    def _begin(self) -> None:
        self._headers.clear()
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS + 1:
            raise InvalidJob(f"the form has more than {MAX_FIELDS} fields")

    def _header_name(self, piece: bytes, start: int, end: int) -> None:
        self._extend(self._header[0], piece[start:end])

    def _header_value(self, piece: bytes, start: int, end: int) -> None:
        self._extend(self._header[1], piece[start:end])

    def _extend(self, text: bytearray, piece: bytes) -> None:
        text.extend(piece)
        if sum(map(len, self._header)) > MAX_HEADER_BYTES or len(self._headers) > MAX_FIELDS:
            raise InvalidJob(f"a part's header is longer than {MAX_HEADER_BYTES} bytes")

    def _header_end(self) -> None:
        name, value = (bytes(text) for text in self._header)
        self._headers[name.lower()] = value
        for text in self._header:
            text.clear()

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._value = bytearray()
        if self._name == self.field_name:
            if self.filename:
                raise InvalidJob(f"{self.field_name}: given twice", self.field_name)
            self.filename = options.get(b"filename", b"").decode(errors="replace")[:256] or "file"
            self._value = None

    def _content(self, piece: bytes, start: int, end: int) -> None:
        if self._value is None:
            content = memoryview(piece)[start:end]
            self.num_bytes += self.sink.write(content)
            self._content_digest.update(content)
            return
        self._value.extend(piece[start:end])
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidJob(f"{self._name}: longer than {MAX_FIELD_BYTES} bytes", self._name)

    def _end(self) -> None:
        if self._value is not None:
            self.fields[self._name] = self._value.decode(errors="replace")

    def digest(self) -> str:
        """Return a digest of the file and the fields, however the parts are divided."""
        parts = [self.filename, self._content_digest.hexdigest(), sorted(self.fields.items())]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def declared_bytes(request: Request, limit_bytes: int) -> int:
    """Return the most bytes that a file in the body can have: a body may not say how long it is."""
    length = request.headers.get("content-length", "")
    return min(int(length), limit_bytes) if length.isdecimal() else limit_bytes


async def receive(
    request: Request, part: Path, limit_bytes: int, field_name: str = "file"
) -> Upload:
    """Write the body's file, under its name in the form, to `part`, and sync it.

    Raises InvalidJob, BodyTooLarge, UnreadableBody, Cancelled.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnreadableBody("Content-Encoding: files are sent as they are")
    too_large = BodyTooLarge(f"{field_name}: larger than {limit_bytes} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit_bytes + ROOM_BYTES:
        raise too_large
    with part.open("wb") as sink:
        upload = Upload(sink, field_name)
        parser, num_received = upload.parser(request.headers.get("content-type", "")), 0
        try:
            async for piece in request.stream():
                num_received += len(piece)
                if num_received > limit_bytes + ROOM_BYTES or upload.num_bytes > limit_bytes:
                    raise too_large
                await asyncio.to_thread(parser.write, piece)
            parser.finalize()
        except MultipartParseError as error:
            raise InvalidJob(f"the body is not valid multipart/form-data: {error}") from None
        except ClientDisconnect:
            raise Cancelled("the caller hung up before the end of the body") from None
        if upload.num_bytes > limit_bytes:
            raise too_large
        if not upload.filename:
            raise InvalidJob(f"{field_name}: missing", field_name)
        sink.flush()
        await asyncio.to_thread(os.fsync, sink.fileno())
    return upload
