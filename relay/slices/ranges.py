"""Read the Range header of a GET (RFC 9110 section 14): one range of bytes, or the whole. Pure."""

import re
from dataclasses import dataclass

_ONE_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) of a file; `partial` when they were asked for by Range."""

    start: int
    end: int
    partial: bool

    def content_range(self, size_bytes: int) -> str:
        return f"bytes {self.start}-{self.end - 1}/{size_bytes}"


def span_of(header: str | None, size_bytes: int) -> Span | None:
    """
    Return what to send, or None when the range cannot be satisfied (416).

    A header that is not one range of bytes is ignored, as RFC 9110 section 14.2 allows: the whole is sent.
    """
    match = _ONE_RANGE.fullmatch(header.strip()) if header else None
    if match is None or match.groups() == ("", ""):
        return Span(0, size_bytes, partial=False)
    first, last = match.groups()
    if not first:  # the last N bytes
        start, end = max(0, size_bytes - int(last)), size_bytes
    else:
        start, end = int(first), min(size_bytes, int(last) + 1 if last else size_bytes)
        if last and int(last) < int(first):
            return Span(0, size_bytes, partial=False)  # not a valid range at all
    return Span(start, end, partial=True) if start < end else None
