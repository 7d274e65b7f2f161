"""Range headers, RFC 9110 section 14."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.slices.ranges import Span, span_of


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, Span(0, 10, False)),
        ("bytes=0-3", Span(0, 4, True)),
        ("bytes=4-", Span(4, 10, True)),
        ("bytes=-3", Span(7, 10, True)),
        ("bytes=-99", Span(0, 10, True)),
        ("bytes=8-99", Span(8, 10, True)),
        ("bytes=10-", None),
        ("bytes=-0", None),
        ("bytes=5-3", Span(0, 10, False)),
        ("bytes=0-1,3-4", Span(0, 10, False)),
        ("items=0-1", Span(0, 10, False)),
        ("bytes=-", Span(0, 10, False)),
        ("bytes=a-b", Span(0, 10, False)),
    ],
)
def test_range_is_read_as_the_rfc_says(header: str | None, expected: Span | None) -> None:
    assert span_of(header, 10) == expected


@given(st.text(max_size=20) | st.from_regex(r"bytes=\d*-\d*", fullmatch=True), st.integers(0, 100))
def test_any_header_gives_a_span_inside_the_file(header: str, size: int) -> None:
    span = span_of(header, size)
    assert span is None or 0 <= span.start <= span.end <= size
