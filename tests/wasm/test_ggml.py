"""
ggml's own libraries as judges: their dequantisation, and their dot products for this CPU.

Only where `make oracles` has fetched them (Linux, x86-64). gguf's dequantisation judges everywhere
(test_reference.py).
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from backbone.experts import reference
from backbone.model.formula import FORMATS, Formula
from tests.backbone.experts.test_reference import relative_error, weights_f64
from tests.wasm.calls import Sample, kernels, random_matrix

FOLDER = Path(__file__).parents[1] / "oracles/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="only after `make oracles`, on Linux x86-64")


class Traits(ctypes.Structure):
    """struct ggml_type_traits."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float", ctypes.c_void_p),
    ]


class CpuTraits(ctypes.Structure):
    """struct ggml_type_traits_cpu."""

    _fields_ = [
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    ]


@cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Give ggml's base, and the build of its dot products that any x86-64 runs."""
    base = ctypes.CDLL(str(FOLDER / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(FOLDER / "libggml-cpu-x64.so"))
    cpu.ggml_cpu_init()
    base.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(CpuTraits)
    base.ggml_row_size.restype = ctypes.c_size_t
    base.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    return base, cpu


def converter(address: int) -> Callable[[int, int, int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)


def ggml_weights(blocks: npt.NDArray[np.uint8], ggml_type: int, cols: int) -> npt.NDArray[np.float32]:
    base, _ = libraries()
    if ggml_type == 0:
        return blocks.view("<f4")
    to_float = converter(base.ggml_get_type_traits(ggml_type)[0].to_float)
    out = np.empty((len(blocks), cols), np.float32)
    for row, values in zip(blocks, out, strict=True):
        to_float(row.ctypes.data, values.ctypes.data, cols)
    return out


def ggml_dot(
    blocks: npt.NDArray[np.uint8], ggml_type: int, x: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    base, cpu = libraries()
    traits = cpu.ggml_get_type_traits_cpu(ggml_type)[0]
    kind = ctypes.CFUNCTYPE(
        None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t,
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
    )  # fmt: skip
    vec_dot = kind(traits.vec_dot)
    cols = x.shape[1]
    rounded = np.zeros((len(x), base.ggml_row_size(traits.vec_dot_type, cols)), np.uint8)
    if traits.vec_dot_type == 0:
        rounded = x.view(np.uint8)
    else:
        from_float = converter(cpu.ggml_get_type_traits_cpu(traits.vec_dot_type)[0].from_float)
        for row, out in zip(x, rounded, strict=True):
            from_float(row.ctypes.data, out.ctypes.data, cols)
    y = np.empty((len(x), len(blocks)), np.float32)
    for t in range(len(x)):
        for r in range(len(blocks)):
            vec_dot(cols, y[t, r:].ctypes.data, 0, blocks[r].ctypes.data, 0, rounded[t].ctypes.data, 0, 1)
    return y


@pytest.mark.parametrize("ggml_type", FORMATS)
def test_weights_are_those_of_ggml(ggml_type: int) -> None:
    blocks = random_matrix(np.random.default_rng(ggml_type), ggml_type, 40, 512).reshape(40, -1)
    ours = weights_f64(blocks, ggml_type).astype(np.float32)
    assert np.array_equal(ours, ggml_weights(blocks, ggml_type, 512))


@pytest.mark.parametrize("ggml_type", FORMATS)
def test_dot_products_are_those_of_ggml(ggml_type: int) -> None:
    """ggml rounds x to int8 as well, where it does with other scales: about one percent apart."""
    rng = np.random.default_rng(100 + ggml_type)
    blocks = random_matrix(rng, ggml_type, 24, 512).reshape(24, -1)
    x = rng.standard_normal((3, 512), np.float32)
    theirs = ggml_dot(blocks, ggml_type, x).astype(np.float64)
    assert relative_error(reference.dot(blocks, ggml_type, x), theirs) < 2e-2


@pytest.mark.parametrize("ggml_type", FORMATS)
def test_an_expert_is_that_of_ggmls_weights_in_float64(ggml_type: int) -> None:
    """Every build, a whole expert: silu(gate x) * up x, then down."""
    rng = np.random.default_rng(200 + ggml_type)
    formula = Formula(512, 256, ggml_type, ggml_type, ggml_type)
    parts = [random_matrix(rng, ggml_type, *shape) for shape in ((256, 512), (256, 512), (512, 256))]
    x = rng.standard_normal((3, 512), np.float32)
    ones = np.ones(3, np.uint16)
    case = Sample(formula, [np.concatenate(parts)], x, ones, np.zeros(3, np.uint16), np.ones(3, np.float32))
    gate, up, down = (
        ggml_weights(part.reshape(rows, -1), ggml_type, cols).astype(np.float64)
        for part, rows, cols in zip(parts, (256, 256, 512), (512, 512, 256), strict=True)
    )
    g = x @ gate.T
    exact = (g * (1 + np.tanh(g / 2)) / 2 * (x @ up.T)) @ down.T  # g times its sigmoid
    bound = 1e-5 if FORMATS[ggml_type].block == 1 else 3e-2
    for kernel in kernels():
        assert relative_error(case.outputs(kernel), exact) < bound, kernel.build
