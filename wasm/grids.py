"""
Write formats/grids.h: the grids of the IQ formats, as codes, from the `gguf` package's data.

A grid is part of the file format, as a table of characters is part of a text format: the weights of a block
name points of it. A point is kept as one code per column, 2 bits wide (IQ1, IQ2) or 3 (IQ3), the first
column lowest; formats/looked_up.h knows the level of each code.

    python wasm/grids.py            write it; a test fails when it is stale
"""

from pathlib import Path

import numpy as np
from gguf import quants

HEADER = Path(__file__).resolve().parent / "formats" / "grids.h"
GRIDS = {
    "iq1_grid": quants.IQ1_S, "iq2_xxs_grid": quants.IQ2_XXS, "iq2_xs_grid": quants.IQ2_XS,
    "iq2_s_grid": quants.IQ2_S, "iq3_xxs_grid": quants.IQ3_XXS, "iq3_s_grid": quants.IQ3_S,
}  # fmt: skip


def codes(source: type) -> "np.ndarray":
    """Give one number per point of a grid."""
    source.init_grid()
    points = np.asarray(source.grid).reshape(source.grid_shape)
    width = 3 if len(source.grid_map) > 4 else 2
    code = np.searchsorted(source.grid_map, points)
    return (code << width * np.arange(points.shape[1])).sum(axis=1)


def text() -> str:
    """Give the whole header."""
    lines = [
        "// The grids of the IQ formats, one code per column: written by wasm/grids.py.",
        "// clang-format off",
        "#include <stdint.h>",
        "",
    ]
    for name, source in GRIDS.items():
        numbers = codes(source)
        lines.append(f"static const uint16_t {name}[{len(numbers)}] __attribute__((unused)) = {{")
        for at in range(0, len(numbers), 16):
            lines.append("    " + " ".join(f"{n}," for n in numbers[at : at + 16]))
        lines.append("};")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    HEADER.write_text(text())
