"""
Read JSON payloads strictly: every key has a type and a bound, and a breach names frame and key.

Unknown keys are ignored, so that a newer peer may say more; missing or ill-typed ones are refused.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from relay.wire.errors import RemoteProtocolError

_HEX = re.compile(r"[0-9a-f]*\Z")
_HEX_DIGITS = b"0123456789abcdef"
_INDEX = re.compile(r"(0|[1-9][0-9]{0,4})\Z")

MAX_SAFE_INT = (1 << 53) - 1  # what JavaScript can count exactly


class Fields:
    """One JSON object under inspection; `where` names it in errors, like `Assign.layers[3]`."""

    __slots__ = ("_object", "where")

    def __init__(self, where: str, value: object) -> None:
        if not isinstance(value, dict):
            raise RemoteProtocolError(f"{where}: an object is needed, not {type(value).__name__}")
        self.where = where
        self._object: dict[str, Any] = value

    @classmethod
    def parse(cls, where: str, payload: bytes, max_containers: int = 1 << 30) -> "Fields":
        """
        Parse one UTF-8 JSON object; NaN, Infinity and bottomless nesting are refused.

        max_containers: of arrays and objects; a text that has more brackets is not parsed at all.
        """
        if payload.count(b"[") + payload.count(b"{") > max_containers:
            raise RemoteProtocolError(f"{where}: more than {max_containers} arrays and objects")

        def refuse(name: str) -> NoReturn:
            raise RemoteProtocolError(f"{where}: {name} is not JSON")

        try:
            value = json.loads(payload.decode("utf-8"), parse_constant=refuse)
        except (ValueError, RecursionError) as exc:
            raise RemoteProtocolError(f"{where}: not one UTF-8 JSON object") from exc
        return cls(where, value)

    def raw(self, key: str) -> Any:
        """The value as it stands; refused when missing."""
        try:
            return self._object[key]
        except KeyError:
            raise RemoteProtocolError(f"{self.where}.{key} is missing") from None

    @property
    def json(self) -> dict[str, Any]:
        """The whole object, keys nobody asked for included."""
        return self._object

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._object.get(key) is not None

    def fail(self, key: str, expected: str) -> NoReturn:
        """Refuse the value of `key`; the value itself is shown, shortened."""
        value = self._object.get(key)
        found = repr(value[:40] if isinstance(value, str) else value)
        if isinstance(value, (list, dict)):  # may be nested too deep to print
            found = "an array" if isinstance(value, list) else "an object"
        raise RemoteProtocolError(f"{self.where}.{key}: {expected} is needed, not {found[:60]}")

    def text(self, key: str, max_chars: int) -> str:
        value = self.raw(key)
        if not isinstance(value, str) or len(value) > max_chars:
            self.fail(key, f"a string of at most {max_chars} characters")
        if any("\ud800" <= char <= "\udfff" for char in value):
            self.fail(key, "a string without lone surrogates")  # it could not be written again as UTF-8
        return value

    def one_of(self, key: str, allowed: frozenset[str]) -> str:
        value = self.raw(key)
        if not isinstance(value, str) or value not in allowed:
            self.fail(key, "one of " + ", ".join(sorted(allowed)))
        return value

    def hex(self, key: str, chars: int) -> str:
        value = self.raw(key)
        if not is_hex(value, chars):
            self.fail(key, f"{chars} lower-case hex digits")
        return str(value)

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.raw(key)
        if type(value) is not int or not low <= value <= high:
            self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.raw(key)
        if type(value) not in (int, float) or not low <= value <= high:  # NaN compares false
            self.fail(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.raw(key)
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def array(self, key: str, max_items: int) -> list[Any]:
        value = self.raw(key)
        if not isinstance(value, list) or len(value) > max_items:
            self.fail(key, f"an array of at most {max_items} items")
        return value

    def objects(self, key: str, max_items: int) -> "list[Fields]":
        return [Fields(f"{self.where}.{key}[{i}]", item) for i, item in enumerate(self.array(key, max_items))]

    def object(self, key: str) -> "Fields":
        return Fields(f"{self.where}.{key}", self.raw(key))

    def hexes(self, key: str, chars: int, max_items: int) -> tuple[str, ...]:
        values = self.array(key, max_items)
        if not _are_hex(values, chars):
            self.fail(key, f"an array of {chars} lower-case hex digits each")
        return tuple(values)

    def integers(self, key: str, low: int, high: int, max_items: int) -> tuple[int, ...]:
        values = self.array(key, max_items)
        if not set(map(type, values)) <= {int} or (values and not low <= min(values) <= max(values) <= high):
            self.fail(key, f"an array of integers from {low} to {high}")
        return tuple(values)

    def indexed(self) -> "Iterator[tuple[int, str]]":
        """Iterate an object whose keys are indices written in decimal, like `{"0": …, "17": …}`."""
        for key in self._object:
            if not _INDEX.match(key) or int(key) > 0xFFFF:
                raise RemoteProtocolError(f"{self.where}: key {key[:20]!r} is no index")
            yield int(key), key


def is_hex(value: object, chars: int) -> bool:
    """Whether `value` is a string of exactly `chars` lower-case hex digits."""
    return isinstance(value, str) and len(value) == chars and _HEX.match(value) is not None


def _are_hex(values: list[Any], chars: int) -> bool:
    """Whether all are as `is_hex` wants them; lists are long, so nothing is done item by item."""
    if not set(map(type, values)) <= {str} or not set(map(len, values)) <= {chars}:
        return False
    text = "".join(values)
    return text.isascii() and not text.encode("ascii").translate(None, _HEX_DIGITS)


def fingerprint(identity: str) -> str:
    """Give what people compare of a public key (hex): 80 bits of its SHA-256, `12ab-34cd-56ef-7890-1234`."""
    digits = hashlib.sha256(bytes.fromhex(identity)).hexdigest()[:20]
    return "-".join(digits[at : at + 4] for at in range(0, 20, 4))


def to_json(value: object) -> bytes:
    """Write one JSON payload, compactly; raises ValueError for NaN and Infinity."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
