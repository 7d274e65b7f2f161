"""
Measure how far the graphics kernel is off, per format and formula: the table in wasm/CONTRACT.md, "WebGPU".

    python -m tests.backbone.experts.webgpu_tolerance              the device that the package `wgpu` finds
    python -m tests.backbone.experts.webgpu_tolerance --chromium   SwiftShader in Chromium

Each figure is the largest difference from the exact kernel over experts of 1, 5 and 9 rows, as a share of the
row's largest output.
"""

import argparse
import asyncio
import json
import platform
import shutil
import sys
from datetime import date
from pathlib import Path
from typing import Any

from backbone.experts.webgpu import WebGpuKernel
from backbone.experts.webgpu_formats import FORMATS
from backbone.model.formula import Formula
from tests.fakes.relay import FakeRelay
from tests.wasm.known_answers import FORMULAS

ROWS = (1, 5, 9)
ALL_FORMULAS: tuple[dict[str, Any], ...] = ({"activation": "silu"}, *FORMULAS)
SCRIPT = """
    async ({ formulas, rows, types }) => {
      const { WebGpuKernel } = await import('/src/kernels/webgpu.js');
      const { WasmKernel } = await import('/src/kernels/wasm.js');
      const exact = await WasmKernel.load(new URL('/kernels/kernel-plain.wasm', location.href));
      const read = async (name) => (await fetch(`/src/kernels/webgpu/${name}.wgsl`)).text();
      const kernel = await WebGpuKernel.open({ exact, read });
      const errors = [];
      for (const type of types) {
        for (const formula of formulas) {
          let worst = 0;
          for (const n of rows) {
            const gate = formula.gate_type === null ? null : type;
            const like = { ...formula, gate_type: gate, up_type: type, down_type: type };
            worst = Math.max(worst, await kernel.errorOf(like, n, n));
          }
          errors.push(worst);
        }
      }
      return errors;
    }
"""


def formula_of(ggml_type: int, changes: dict[str, Any]) -> Formula:
    """A formula of this format everywhere; a gate of None stays None."""
    return Formula(0, 0, **({"gate_type": ggml_type} | changes), up_type=ggml_type, down_type=ggml_type)


async def in_chromium(types: list[int]) -> tuple[str, list[float]]:
    """Measure in the page."""
    from playwright.async_api import async_playwright

    formulas = [formula_of(0, changes).to_json() for changes in ALL_FORMULAS]
    async with FakeRelay() as relay, async_playwright() as playwright:
        flags = ["--no-sandbox", "--enable-unsafe-webgpu"]
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = await browser.new_page()
        await page.goto(relay.url)
        found = await page.evaluate(SCRIPT, {"formulas": formulas, "rows": ROWS, "types": types})
        name = f"Chromium {browser.version}"
        await browser.close()
    return name, found


def headless(types: list[int]) -> tuple[str, list[float]]:
    """Measure on the device of the package `wgpu`."""
    kernel = WebGpuKernel()
    errors = [
        max(kernel.error_of(formula_of(ggml_type, changes), rows, rows) for rows in ROWS)
        for ggml_type in types
        for changes in ALL_FORMULAS
    ]
    return kernel.device_name, errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", action="store_true")
    parser.add_argument("--only", default="", metavar="PREFIX", help="formats whose name begins so")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    types = [ggml_type for ggml_type, found in FORMATS.items() if found.file.startswith(args.only)]
    name, errors = asyncio.run(in_chromium(types)) if args.chromium else headless(types)
    print(f"# {name}, {platform.machine()}, {date.today()}; {' '.join(sys.argv)}")
    names = ("silu", *range(len(FORMULAS)))  # CONTRACT.md, "Known answers"
    print("format  ", *(f"{name:>8}" for name in names), "   worst")
    rows = [errors[i : i + len(ALL_FORMULAS)] for i in range(0, len(errors), len(ALL_FORMULAS))]
    for ggml_type, row in zip(types, rows, strict=True):
        print(f"{FORMATS[ggml_type].file:<8}", *(f"{error:8.0e}" for error in row), f"{max(row):8.0e}")
    print(f"worst    {max(errors):.1e}")
    if args.json:
        args.json.write_text(json.dumps({FORMATS[t].file: r for t, r in zip(types, rows, strict=True)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
