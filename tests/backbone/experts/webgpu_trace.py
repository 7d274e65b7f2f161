"""
Say where a row of the graphics kernel in Chromium that is far off comes from: which int8 of h moved by one.

    python -m tests.backbone.experts.webgpu_trace IQ4_XS 6     format and formula, as in CONTRACT.md, "WebGPU"

An int moves where h / scale stands on the middle between two; the row is then off by one step of that column
of down. What remains after taking that step away is printed, as a share of the difference.
"""

import argparse
import asyncio
import shutil
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backbone.experts import reference
from backbone.experts.webgpu_formats import FORMATS
from backbone.model.formula import Formula
from tests.backbone.experts.webgpu_tolerance import ALL_FORMULAS, ROWS, formula_of
from tests.fakes.relay import FakeRelay

FAR_OFF = 1e-5  # of the row's largest: well above what one float operation differs by
GRID_STEP = 2.0**-38  # `errorOf` in webgpu.js: x32, row exponent 1, layer exponent -8
SCRIPT = """
    async ({ like, rows }) => {
      const { WebGpuKernel } = await import('/src/kernels/webgpu.js');
      const { WasmKernel } = await import('/src/kernels/wasm.js');
      const { sample } = await import('/src/kernels/webgpu/sample.js');
      const exact = await WasmKernel.load(new URL('/kernels/kernel-plain.wasm', location.href));
      const read = async (name) => (await fetch(`/src/kernels/webgpu/${name}.wgsl`)).text();
      const kernel = await WebGpuKernel.open({ exact, read });
      const found = [];
      for (const n of rows) {
        const heard = {};
        exact.answer = (call) => (heard.exact = WasmKernel.prototype.answer.call(exact, call));
        kernel.answer = async (call) => {
          heard.call = call;
          return (heard.ours = await WebGpuKernel.prototype.answer.call(kernel, call));
        };
        await kernel.errorOf(like, n, n);
        const { formula, slices, x } = sample(like, n, n);
        found.push({
          formula, x: [...x], slices: slices.map((slice) => [...slice]),
          ours: [...heard.ours].map(String), exact: [...heard.exact].map(String),
          experts: [...heard.call.pickExpert], weights: [...heard.call.pickWeight],
        });
      }
      return found;
    }
"""


class Moved(NamedTuple):
    """The int of h that explains a row best: unexplained share, pick, column, by how much, h / scale."""

    remains: float
    pick: int
    column: int
    by: int
    ratio: float


async def in_chromium(like: Formula) -> list[dict[str, Any]]:
    """Compute in the page; two picks for each row."""
    from playwright.async_api import async_playwright

    async with FakeRelay() as relay, async_playwright() as playwright:
        flags = ["--no-sandbox", "--enable-unsafe-webgpu"]
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = await browser.new_page()
        await page.goto(relay.url)
        found = await page.evaluate(SCRIPT, {"like": like.to_json(), "rows": ROWS})
        await browser.close()
    return list(found)


def explained(found: dict[str, Any]) -> Iterator[tuple[int, float, Moved]]:
    """Each row that is far off: its number, how far, and what moved."""
    formula = Formula(**found["formula"])
    shape = (-1, formula.hidden_dim)
    ours, exact = (np.array(found[name], np.int64).reshape(shape) * GRID_STEP for name in ("ours", "exact"))
    x = np.array(found["x"], np.float32).reshape(shape)
    slices = [np.array(each, np.uint8) for each in found["slices"]]
    for row, off in enumerate(ours - exact):
        share = float(np.abs(off).max() / np.abs(exact[row]).max())
        if share > FAR_OFF:
            moves: list[Moved] = []
            for pick in (2 * row, 2 * row + 1):
                expert = slices[found["experts"][pick]]
                moves += steps(formula, expert, x[row], found["weights"][pick], off, pick)
            yield row, share, min(moves)


def steps(
    formula: Formula, slice_bytes: reference.Bytes, x: reference.Float32, weight: float,
    off: npt.NDArray[np.float64], pick: int,
) -> Iterator[Moved]:  # fmt: skip
    """Take every int of this pick's h one up and one down."""
    gate, up, down = reference.take_apart(formula, slice_bytes)
    h = reference.activate(formula, gate.times(x[None]), up.times(x[None]))
    block = reference.FORMATS[down.ggml_type].block
    _, scales = reference.quantise(h, block)
    for column in range(formula.expert_dim):
        one = np.zeros_like(h)
        one[0, column] = 127.0  # an int of 127 at a scale of one
        scale = scales[0, column // block]
        share = weight * scale * down.times(one)[0] / 127.0
        for by in (1, -1):
            remains = float(np.abs(off - by * share).max() / np.abs(off).max())
            yield Moved(remains, pick, column, by, float(h[0, column] * (np.float32(1) / scale)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("format")
    parser.add_argument("formula", help="silu, or a number")
    args = parser.parse_args()
    (ggml_type,) = (number for number, layout in FORMATS.items() if layout.file == args.format.lower())
    changes = ALL_FORMULAS[0 if args.formula == "silu" else 1 + int(args.formula)]
    rows = 0
    for found in asyncio.run(in_chromium(formula_of(ggml_type, changes))):
        for row, share, moved in explained(found):
            rows += 1
            print(
                f"row {row}, off by {share:.1e}: pick {moved.pick}, column {moved.column} of h moved by "
                f"{moved.by:+d}; h / scale is {moved.ratio:.6f}; "
                f"{moved.remains:.0e} of the difference remains"
            )
    print(f"{rows} rows are off by more than {FAR_OFF:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
