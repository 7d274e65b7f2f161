"""
What V8 makes of the wasm kernel: the instructions of its innermost loops, by format and build.

Node prints the machine code of its last tier (`--print-wasm-code`) after a second of computing one format.
Each row is one loop of the format's `rows`, for a tile of 4, 2 or 1 rows of x: `products` are instructions
that multiply weights, `stack` those that spill to the stack or fetch from there, `broadcast` loads that give
four activations to all lanes, `address` computes where to load. A loop around others is not shown, and
code that V8 put out of line, such as what follows a loop, may be counted with it. x86 only.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from bench_kernel import CACHED_DIMS, numbers, random_slice
from table import Row, arguments, report
from wasm_rows import BUILDS, kernel_files, node_program

from backbone.model.formula import FORMATS, Formula

SCRIPT = Path(__file__).with_suffix(".mjs")
PRODUCTS = {"vpmaddwd", "vpmaddubsw", "vpdpbusd", "pmaddwd", "pmaddubsw"}
LEAST_PRODUCTS = 8  # fewer in a loop: not the products of a matrix
INSTRUCTION = re.compile(r"^0x\w+ +(\w+)  \w+ +(?:REX\.\w+ )?(\w+) *(.*)$", re.MULTILINE)
TARGET = re.compile(r"<\+0x(\w+)>")


def machine_code(build: str, ggml_type: int, rows: int) -> str:
    """Give what node prints of all it compiled."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(random_slice(Formula(*CACHED_DIMS[0], *[ggml_type] * 3), 0))
        file.flush()
        command = [node_program(), "--print-wasm-code", SCRIPT, kernel_files()[build]]
        command += [file.name, str(ggml_type), str(rows)]
        return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def kind_of(name: str, operands: str) -> str:
    if name in PRODUCTS:
        return "products"
    if "[rbp" in operands or "[rsp" in operands:
        return "stack"
    if "broadcast" in name:
        return "broadcast"
    return "address" if name.startswith("lea") else "other"


def innermost_loops(function: str) -> list[Counter[str]]:
    """Count the instructions of each loop of a function by kind."""
    code = [(int(offset, 16), name, operands) for offset, name, operands in INSTRUCTION.findall(function)]
    index = {offset: i for i, (offset, _, _) in enumerate(code)}
    loops = []
    for i, (_, name, operands) in enumerate(code):
        target = TARGET.search(operands)
        first = index.get(int(target[1], 16), i + 1) if target and name.startswith("j") else i + 1
        if first <= i:
            loops.append(range(first, i + 1))
    inner = [a for a in loops if not any(b != a and b[0] >= a[0] and b[-1] <= a[-1] for b in loops)]
    counts = [Counter(kind_of(*code[i][1:]) for i in loop) for loop in inner]
    return [count for count in counts if count["products"] >= LEAST_PRODUCTS]


def rows_of(build: str, ggml_type: int, num_tokens: int) -> list[Row]:
    functions = machine_code(build, ggml_type, num_tokens).split("--- WebAssembly code ---")
    found = []
    for function in functions:
        for count in innermost_loops(function) if "compiler: TurboFan" in function else []:
            kinds = {kind: count[kind] for kind in ("products", "stack", "broadcast", "address", "other")}
            found.append(
                dict(format=FORMATS[ggml_type].name, build=build, instructions=count.total()) | kinds
            )
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--formats", default="Q8_0,Q4_K,Q6_K,MXFP4")
    parser.add_argument("--builds", default=",".join(BUILDS))
    parser.add_argument("--rows", type=numbers, default=[4], help="of x, while the code gets warm")
    options = parser.parse_args()
    names = options.formats.split(",")
    types = [ggml_type for ggml_type, layout in FORMATS.items() if layout.name in names]
    rows: list[Row] = []
    for ggml_type in types:
        for build in options.builds.split(","):
            for num_tokens in options.rows:
                rows += rows_of(build, ggml_type, num_tokens)
    if not rows:
        parser.error("no loops found: is this node built without a disassembler, or not for x86?")
    report("Innermost loops of the kernel as V8 compiles them", rows, options.json)


if __name__ == "__main__":
    main()
