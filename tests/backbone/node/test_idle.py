"""A node that nobody asks says why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.node.idle import why_idle

BACKBONE = {"model_name": "big\x1b[2J", "slice_bytes": 5_000_000, "inexact": False}
OTHER = {"model_name": "small", "slice_bytes": 3_000_000, "inexact": True}


@pytest.mark.parametrize(
    ("backbones", "memory_bytes", "exact", "expected"),
    [
        ([], 10**9, True, "no backbone is at this relay now"),
        ([BACKBONE], 10**9, False, "backbone serve --allow-inexact"),
        ([BACKBONE, OTHER], 10**9, False, None),
        ([BACKBONE], 2_000_000, True, "--memory 2 MB holds no expert of big\ufffd[2J: one has 5 MB"),
        ([BACKBONE, OTHER], 4_000_000, True, None),
        ([BACKBONE], 10**9, True, None),
    ],
)
def test_the_reason_is_what_the_relay_s_status_says(
    backbones: list[object], memory_bytes: int, exact: bool, expected: str | None
) -> None:
    kernel = "native-avx2" if exact else "webgpu"
    why = why_idle({"backbones": backbones}, kernel, memory_bytes, exact)
    assert why == expected if expected is None else why is not None and expected in why


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["backbones", "slice_bytes", "model_name", "inexact"]), inner, max_size=4
    ),
)  # fmt: skip


@given(st.dictionaries(st.just("backbones"), JSON), st.booleans())
def test_whatever_a_relay_says_is_survived(status: dict[str, object], exact: bool) -> None:
    why = why_idle(status, "webgpu", 1, exact)
    assert why is None or why.isprintable()
