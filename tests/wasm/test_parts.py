"""The small parts of the kernel by themselves: half floats, wire forms, SHA-256."""

import ctypes
import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from backbone.experts.native import BUILT, NATIVE_BUILDS
from relay.wire.tensors import Grid, XEncoding, decode_partial, encode_partial, encode_x, row_exponents
from tests.wasm.calls import kernels

HALVES = np.arange(65536, dtype=np.uint16)


@pytest.fixture(params=[k.build.removeprefix("native-") for k in kernels()])
def lib(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The functions of expert.h that the binding does not need."""
    path = next(BUILT.glob(f"libexpert-{request.param}.*"))
    loaded = ctypes.CDLL(str(path))
    loaded.expert_encode_x.restype = ctypes.c_ssize_t
    loaded.expert_encode_partial.restype = ctypes.c_ssize_t
    return loaded


def at(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def size(n: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(n)


def test_the_builds_are_named_as_the_cpu_ranks_them() -> None:
    assert [k.build for k in kernels()] == [f"native-{name}" for name in NATIVE_BUILDS[: len(kernels())]]


def test_every_half_float_widens_as_numpy_does(lib: ctypes.CDLL) -> None:
    out = np.empty(65536, np.float32)
    lib.expert_f16_to_f32(at(HALVES), size(65536), at(out))
    expected = HALVES.view(np.float16).astype(np.float32)
    finite = np.isfinite(expected)
    assert np.array_equal(out[finite].view(np.uint32), expected[finite].view(np.uint32))
    assert np.array_equal(np.isnan(out), np.isnan(expected))
    assert np.array_equal(np.isinf(out), np.isinf(expected))


def test_every_half_float_and_its_neighbours_narrow_as_numpy_does(lib: ctypes.CDLL) -> None:
    """Also halfway between two halves, one bit to either side of it, and random bits."""
    halves = HALVES.view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    ordered = np.append(np.unique(halves), np.float32(65536))  # what infinity stands for when rounding
    values = np.concatenate([halves, ordered[:-1] / 2 + ordered[1:] / 2])
    values = np.concatenate(
        [values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(0))]
    )
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    values = np.concatenate(
        [values, bits[~np.isnan(bits)], np.array([65519.996, 65520, 1e9, -1e9], np.float32)]
    )
    out = np.empty(len(values), np.uint16)
    lib.expert_f32_to_f16(at(values), size(len(values)), at(out))
    with np.errstate(over="ignore"):
        assert np.array_equal(out, values.astype(np.float16).view(np.uint16))


@given(arrays(np.float32, (3, 256), elements=st.floats(-(2.0**127), 2.0**127, width=32)))
@settings(deadline=None, max_examples=40)
def test_x_travels_as_the_relays_codec_says(x: npt.NDArray[np.float32]) -> None:
    for build in (k.build.removeprefix("native-") for k in kernels()):
        lib = ctypes.CDLL(str(next(BUILT.glob(f"libexpert-{build}.*"))))
        lib.expert_encode_x.restype = ctypes.c_ssize_t
        for encoding in (XEncoding.F32, XEncoding.Q8A32, XEncoding.Q8A256):
            out = np.empty(x.size * 4, np.uint8)
            used = lib.expert_encode_x(at(x), size(3), size(256), size(encoding), at(out), size(out.size))
            assert out[:used].tobytes() == encode_x(x, encoding)
        exponents = np.empty(3, np.int16)
        assert lib.expert_row_exponents(at(x), size(3), size(256), at(exponents)) == 0
        assert np.array_equal(exponents, row_exponents(x))


@given(
    arrays(np.int64, (3, 5), elements=st.integers(-(2**62), 2**62) | st.integers(-40000, 40000)),
    st.sampled_from(Grid),
)
@settings(deadline=None)
def test_partials_travel_as_the_relays_codec_says(sums: npt.NDArray[np.int64], grid: Grid) -> None:
    expected = encode_partial(sums, grid)
    for kernel in kernels():
        assert kernel.encode_partial(sums, grid) == expected
    widths, data = expected
    assert np.array_equal(decode_partial(widths, data, 5, grid), sums)


def test_adding_a_partial_is_the_inverse_of_encoding(lib: ctypes.CDLL) -> None:
    rng = np.random.default_rng(2)
    sums = rng.integers(-(2**40), 2**40, (4, 6)) >> np.array([[0], [10], [30], [40]])
    for grid in Grid:
        widths, data = (np.frombuffer(part, np.uint8) for part in encode_partial(sums, grid))
        total = sums.copy()
        args = (at(widths), at(data), size(data.size), size(4), size(6), size(grid), at(total))
        assert lib.expert_add_partial(*args) == 0
        assert np.array_equal(total, 2 * sums)
        short = (at(widths), at(data), size(data.size - 8), size(4), size(6), size(grid), at(total))
        assert lib.expert_add_partial(*short) == -3
    wrong = np.full(4, 3, np.uint8)
    assert (
        lib.expert_add_partial(at(wrong), at(data), size(data.size), size(4), size(6), size(1), at(total))
        == -8
    )


def test_decoded_sums_are_multiples_of_the_step(lib: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    sums = rng.integers(-(2**45), 2**45, (3, 8))
    exponents = np.array([-3, 0, 9], np.int16)
    for grid, bits, layer in ((0, 31, np.array([5], np.int32)), (1, 15, np.arange(8, dtype=np.int32) - 4)):
        y = np.empty((3, 8), np.float32)
        assert (
            lib.expert_decode_sums(at(sums), size(3), size(8), at(exponents), size(grid), at(layer), at(y))
            == 0
        )
        expected = np.ldexp(sums.astype(np.float64), exponents[:, None].astype(int) + layer - bits)
        assert np.array_equal(y, expected.astype(np.float32))


@pytest.mark.parametrize("length", [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 4099])
def test_sha256_is_hashlibs(lib: ctypes.CDLL, length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, max(length, 1), np.uint8)[:length]
    digest = np.empty(32, np.uint8)
    lib.expert_sha256(at(data), size(length), at(digest))
    assert digest.tobytes() == hashlib.sha256(data.tobytes()).digest()
