"""Print one table with machine, command and date, and write its rows as JSON when asked."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import Any

type Row = dict[str, Any]


def arguments(description: str) -> argparse.ArgumentParser:
    """Give a parser that knows `--json FILE`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return parser


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def report(title: str, rows: Sequence[Row], json_path: Path | None = None, notes: Sequence[str] = ()) -> None:
    """Print `rows` (same keys each; a float is shown with three significant digits)."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    print(f"\n{title}")
    print(f"{_cpu()}, {os.cpu_count()} cores · {command} · {datetime.now(UTC):%Y-%m-%d}\n")
    cells = [[_text(row[key]) for key in rows[0]] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in cells)) for i, key in enumerate(rows[0])]
    print("  ".join(key.ljust(width) for key, width in zip(rows[0], widths, strict=True)))
    print("  ".join("-" * width for width in widths))
    for line, row in zip(cells, rows, strict=True):
        numeric = [isinstance(value, int | float) for value in row.values()]
        print(
            "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True))
        )
    for note in notes:
        print(note)
    if json_path is not None:
        write_json(rows, json_path)


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write rows as JSON, which has no NaN: a cell without a figure is null there."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and isnan(value) else value

    found = [{key: plain(value) for key, value in row.items()} for row in rows]
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def _text(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
