"""
Write formats/grids.h: the grids of the IQ formats, as levels, from the `gguf` package's data.

A grid is part of the file format, as a table of characters is part of a text format: the weights of a block
name points of it. A point is kept as one byte per column, the first column lowest: the level without its
sign (IQ2, IQ3), or 8 * level + 129, the level and a delta of plus one in eighths as an unsigned byte (IQ1).

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


def points(source: type) -> "np.ndarray":
    """Give one number per point of a grid."""
    source.init_grid()
    levels = np.asarray(source.grid).reshape(source.grid_shape).astype(np.int64)
    if source is quants.IQ1_S:
        levels = 8 * levels + 129
    return np.ascontiguousarray(levels.astype(np.uint8)).view(f"<u{levels.shape[1]}").ravel()


def text() -> str:
    """Give the whole header."""
    lines = [
        "// The grids of the IQ formats, one byte per column: written by wasm/grids.py.",
        "// clang-format off",
        "#include <stdint.h>",
        "",
    ]
    for name, source in GRIDS.items():
        numbers = points(source)
        bits = 8 * numbers.itemsize
        lines.append(f"static const uint{bits}_t {name}[{len(numbers)}] __attribute__((unused)) = {{")
        per_line = 320 // bits
        for at in range(0, len(numbers), per_line):
            lines.append("    " + " ".join(f"{n:#0{2 + bits // 4}x}," for n in numbers[at : at + per_line]))
        lines.append("};")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    HEADER.write_text(text())
