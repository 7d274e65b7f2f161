"""
Show what strangers chose (names, reasons, kernels) on terminals and in logs: nothing of it is obeyed there.

Control characters move a terminal's cursor or forge lines of a log; bidirectional marks disguise a name.
"""

import logging
import sys


def clean(text: str, most_chars: int = 200) -> str:
    """Replace every character that is not shown as itself, and cut what is longer than people read."""
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    return shown if len(shown) <= most_chars else shown[: most_chars - 1] + "…"


class CleanFormatter(logging.Formatter):
    """Clean each record's message, whoever chose the words in it; a traceback keeps its lines."""

    MOST_CHARS = 4000

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = clean(record.message, self.MOST_CHARS)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        return _clean_lines(super().formatException(ei))  # type: ignore[arg-type]


def _clean_lines(text: str) -> str:
    return "\n".join(clean(row, CleanFormatter.MOST_CHARS) for row in text.split("\n"))


def log_to_stderr(
    level: int, form: str = "%(asctime)s %(message)s", date_form: str | None = "%H:%M:%S"
) -> None:
    """Send logs to standard error, cleaned."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(CleanFormatter(form, date_form))
    logging.basicConfig(level=level, handlers=[handler], force=True)
