"""
Exceptions that survive a copy, a pickle and another process.

Python rebuilds an exception by calling its class with `args`. Where the message is built from facts, the
class takes other arguments than the message, and the copy becomes a TypeError that hides the reason.
"""

from typing import Any


class Rebuildable(Exception):
    """Root of our trees: copied as it stands, whatever its constructor takes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[Rebuildable], args: tuple[Any, ...], facts: dict[str, Any]) -> Rebuildable:
    made = kind.__new__(kind)
    made.args = args
    made.__dict__.update(facts)
    return made
