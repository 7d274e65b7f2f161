"""
Pick from the engine's log the line that says why it ended. Pure.

An abort of llama.cpp writes its reason first and a backtrace of any length after it, so the last lines are
the least telling. The first kind of line below that occurs is the reason; the last of its kind counts.
"""

import re
from collections.abc import Iterable

MAX_CHARS = 600
KINDS = [
    re.compile(pattern)
    for pattern in (
        r"GGML_ASSERT\(|GGML_ABORT",
        r"^\S+\.(c|cc|cpp|cu|h|hpp|m|mm):\d+: ",  # ggml_abort(): file, line, message
        r"what\(\):\s+",  # an exception of C++ that nobody caught
        r"^[A-Za-z_.]*(Error|Exception): ",  # the last line of a traceback of Python
        r"Fatal Python error",
        r"(?i)out of memory|bad_alloc|failed to allocate|unable to allocate|cannot allocate",
        r"error loading model",
        r"(?i)\b(error|failed|fatal|refused|unsupported|unknown model architecture)\b",
    )
]
NOISE = re.compile(
    r"^\s*(#\d+ |\[New LWP|\[Thread |\[Inferior|0x[0-9a-f]+ in |Using host libthread|warning: |"
    r"\S*\(\+?[\w:~<>, &*]*\+?0x[0-9a-f]+\)\s*\[|\d+\s+\S+\s+0x[0-9a-f]{6,}|This GDB|"
    r"See: https?://|terminate called|Thread \d+ |File \"|Traceback |__\w+ \(|\s*at \S+:\d+|"
    r"Debuginfod|Enable debuginfod|To make this setting|\[?process \d+|No locals)"
)


def reason(lines: Iterable[str]) -> str:
    """Give the line of a log that says why the engine ended, or "" where the log says nothing."""
    telling = [line.strip() for line in lines if line.strip() and not NOISE.match(line)]
    for kind in KINDS:
        for line in reversed(telling):
            if kind.search(line):
                return _short(line)
    return _short(telling[-1]) if telling else ""


def _short(line: str) -> str:
    line = "".join(char if char.isprintable() else " " for char in line)
    line = re.sub(r"^\d+\.\d+\.\d+\.\d+ ", "", line)  # llama.cpp's clock
    return line if len(line) <= MAX_CHARS else line[: MAX_CHARS - 1] + "…"
