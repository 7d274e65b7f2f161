"""
Say why a node that offered itself is not asked: pure, from what the relay's /status.json says.

Otherwise "offered", or "serving" without a call, would stand there for ever without a word.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from relay.program.text import clean
from relay.program.values import shown_bytes


def why_idle(status: Mapping[str, Any], kernel: str, memory_bytes: int, exact: bool) -> str | None:
    """
    Give one sentence with what to do, or None if nothing here explains it.

    Never raises: a relay of another version may say something else.
    """
    try:
        return _why(status["backbones"], kernel, memory_bytes, exact)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _why(backbones: Sequence[Mapping[str, Any]], kernel: str, memory_bytes: int, exact: bool) -> str | None:
    if not backbones:
        return "no backbone is at this relay now; this node waits for one"
    if not exact and not any(each["inexact"] for each in backbones):
        return (
            f"no backbone here asks {kernel} nodes (backbone serve --allow-inexact); --kernel native is asked"
        )
    smallest = min(backbones, key=lambda each: int(each["slice_bytes"]))
    need = int(smallest["slice_bytes"])
    if memory_bytes < need:
        model = clean(str(smallest["model_name"]), 60)
        return f"--memory {shown_bytes(memory_bytes)} holds no expert of {model}: one has {shown_bytes(need)}"
    return None
