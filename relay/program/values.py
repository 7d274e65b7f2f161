"""
Read what people type, on command lines and in the environment: one reader per kind of value.

A reader takes text and returns the value, or raises BadValue with the text found and what was wanted. Nothing
in it depends on where the text came from, so a flag and its variable always mean the same.
"""

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from urllib.parse import SplitResult, urlsplit

type Reader[T] = Callable[[str], T]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_MOST_S = 10.0 * 365 * 86400  # ten years: what is longer is a typing error, and overflows timers
CORES = os.cpu_count() or 1
MOST_THREADS = max(16, 4 * CORES)  # more only take turns


class BadValue(argparse.ArgumentTypeError, ValueError):
    """A value that cannot be; the message shows it and says what can."""


class OneLineParser(argparse.ArgumentParser):
    """Answer a wrong command line with one line, not with the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}   (see {self.prog} --help)\n")


def port(text: str) -> int:
    """0 to 65535; 0 means any free one."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise BadValue(f"{text!r} is no port: a number from 0 (any free one) to 65535")
    return int(text)


def whole(least: int, most: int, what: str = "number") -> Reader[int]:
    """A whole number within bounds."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise BadValue(f"{text!r} is no {what} from {least} to {most}")
        return int(text)

    return read


def threads(text: str) -> int:
    """At least one, and no more than the cores can take turns on."""
    return whole(1, MOST_THREADS, f"number of threads for {CORES} cores,")(text)


def threads_or_all(text: str) -> int:
    """Like `threads`; 0 means all cores."""
    return 0 if text == "0" else threads(text)


def number(text: str, least: float, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and least <= value <= most):
        raise BadValue(f"{text!r} is no {what} from {least:g} to {most:g}")
    return value


def seconds(least: float = 0.0, most: float = _MOST_S) -> Reader[float]:
    """A finite time."""
    return lambda text: number(text, least, most, "number of seconds")


def size(least: int = 0, most: int = 1 << 62) -> Reader[int]:
    """`512MB`, `2GiB`, `300M` or plain bytes."""

    def read(text: str) -> int:
        match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]I?)?B?", text.strip().upper(), re.ASCII)
        if match is None:
            raise BadValue(f"{text!r} is no size; write 512MB or 2GiB")
        found = int(float(match[1]) * _UNITS[match[2] or ""])
        if found < least:
            raise BadValue(f"{text!r} is too small; {shown_bytes(least)} at least")
        if found > most:
            raise BadValue(f"{text!r} is too much; {shown_bytes(most)} at most")
        return found

    return read


def memory(least: int) -> Reader[int]:
    """A size that this machine, or what its container allows, can hold."""
    total = machine_bytes()

    def read(text: str) -> int:
        found = size(least)(text)
        if total is not None and found > total:
            raise BadValue(f"{text!r} is more than the {shown_bytes(total)} of memory there are here")
        return found

    return read


def flag(text: str) -> bool:
    """`1`, `true`, `yes`, `on`, or their opposites."""
    if text.strip().lower() in _ON:
        return True
    if text.strip().lower() in _OFF:
        return False
    raise BadValue(f"{text!r} is neither true nor false: write 1 or 0")


def line(least: int, most: int) -> Reader[str]:
    """Text of so many characters, all of which can be shown."""

    def read(text: str) -> str:
        if not least <= len(text) <= most:
            raise BadValue(f"{text[:60]!r} has {len(text)} characters; {least} to {most} are needed")
        if not text.isprintable():
            raise BadValue(f"{text[:60]!r} has characters that cannot be shown")
        return text

    return read


def secret(least: int = 1, most: int = 200) -> Reader[str]:
    """A key or token: what a header can carry, and not empty, which would open doors. Never echoed."""

    def read(text: str) -> str:
        if not text:
            raise BadValue("an empty secret protects nothing: leave it out, or give one")
        if not least <= len(text) <= most or not re.fullmatch(r"[\x21-\x7e]+", text):
            raise BadValue(f"a secret of {least} to {most} ASCII characters without blanks is needed")
        return text

    return read


def secrets(text: str) -> tuple[str, ...]:
    """Several, commas between."""
    return tuple(secret()(part.strip()) for part in text.split(","))


def secrets_in(path: Path) -> tuple[str, ...]:
    """The secrets in a file, one a line; so that they stand neither in `ps` nor in a shell's history."""
    try:
        found = [row.strip() for row in path.read_text("ascii").splitlines() if row.strip()]
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is no ASCII text"
        raise BadValue(f"{path}: cannot be read: {why}") from exc
    if not found:
        raise BadValue(f"{path}: there is nothing in it; write the secret into it")
    try:
        return tuple(map(secret(), found))
    except BadValue as exc:
        raise BadValue(f"{path}: {exc}") from exc


def host(text: str) -> str:
    """An address or a name to listen on; no URL."""
    if not re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", text.strip("[]")):
        raise BadValue(f"{text[:60]!r} is no address to listen on: write 127.0.0.1, 0.0.0.0, :: or a name")
    return text.strip("[]")


def host_and_port(text: str) -> tuple[str, int]:
    """`HOST:PORT`."""
    before, colon, after = text.rpartition(":")
    try:
        return host(before) if colon else "", port(after) if colon else port("")
    except BadValue as exc:
        raise BadValue(f"{text[:80]!r} is no HOST:PORT: {exc}") from exc


def url(*schemes: str) -> Reader[str]:
    """An absolute URL with one of these schemes; fragment and last slash taken off."""
    example = f"{schemes[0]}://host:port"

    def read(text: str) -> str:
        parts = split_url(text)
        if parts is None or parts.scheme not in schemes or not parts.hostname:
            raise BadValue(f"{text[:80]!r} is no {' or '.join(schemes)} URL; write {example}")
        if parts.username is not None or parts.query:
            raise BadValue(f"{text[:80]!r}: neither user nor query belong there; write {example}")
        return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"

    return read


def split_url(text: str) -> SplitResult | None:
    """Take a URL apart; None if it is none, or names a port that cannot be."""
    try:
        parts = urlsplit(text)
        wrong = parts.port == 0 or parts.netloc.endswith(":")
    except ValueError:
        return None
    wrong |= re.fullmatch(r"[A-Za-z0-9._:%\[\]-]+", parts.netloc.rpartition("@")[2]) is None
    return None if wrong or not text.isprintable() or " " in text else parts


def path(text: str) -> Path:
    """A file or folder that may or may not be there."""
    try:
        found = Path(text).expanduser()
        os.fsencode(found)
    except (RuntimeError, ValueError):  # nobody's home; characters that no file name has
        text = ""
    if not text or "\0" in text or max(map(len, found.parts), default=0) > 255:
        raise BadValue("this is no path: it is empty, too long, or has characters that no path has")
    return found


def present_file(text: str) -> Path:
    """A file that is there and can be read."""
    found = path(text)
    try:
        with found.open("rb"):
            return found
    except OSError as exc:
        raise BadValue(f"{text}: {exc.strerror}") from exc


def present_folder(text: str) -> Path:
    """A folder that is there."""
    found = path(text)
    try:
        there = found.is_dir()
    except OSError:
        there = False
    if not there:
        raise BadValue(f"{text[:200]}: there is no such folder")
    return found


def why_not_writable(folder: Path) -> str | None:
    """Make a folder if need be; say why no file can be made in it, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        return "it, or a part of its path, is a file"
    except OSError as exc:
        return f"it cannot be made: {exc.strerror}"
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"


def shown_bytes(count: int) -> str:
    """Write a size for people: `2.1 GB`."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} bytes"


def machine_bytes() -> int | None:
    """Memory of this machine, or what its control group allows if that is less; None if nobody says."""
    known = []
    try:
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        pass
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            known.append(int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min((each for each in known if each > 0), default=None)
