"""Name the close codes a session may end with (RFC 6455 section 7.4.2: 4000-4999 are private use)."""

from collections.abc import Mapping
from enum import IntEnum


class CloseCode(IntEnum):
    """Why a session ended. PROTOCOL.md, "Close codes", says who does what next."""

    NORMAL = 1000
    GOING_AWAY = 1001  # RFC 6455 section 7.4.1: a server going down, a page navigated away
    MESSAGE_TOO_BIG = 1009  # RFC 6455 section 7.4.1: said by the WebSocket layer, or a proxy's
    NO_STATUS = 1005  # never sent: the transport ended without a close frame
    PROTOCOL = 4400
    AUTH = 4401
    TIMEOUT = 4408
    REPLACED = 4409
    TOO_LARGE = 4413
    VERSION = 4426
    OVERLOADED = 4429


# After these a client must not try again unchanged: the same bytes would fail the same way.
FATAL = frozenset(
    {
        CloseCode.MESSAGE_TOO_BIG,
        CloseCode.PROTOCOL,
        CloseCode.AUTH,
        CloseCode.REPLACED,
        CloseCode.TOO_LARGE,
        CloseCode.VERSION,
    }
)

# For people, where the other end gave no reason.
WORDS: Mapping[int, str] = {
    0: "nobody answers there",
    CloseCode.NORMAL: "the connection was closed",
    CloseCode.GOING_AWAY: "the other end stopped",
    CloseCode.NO_STATUS: "the connection was closed",
    CloseCode.MESSAGE_TOO_BIG: "a message was too long for what is in between",
    CloseCode.PROTOCOL: "one end could not read the other",
    CloseCode.AUTH: "this identity was refused",
    CloseCode.TIMEOUT: "nothing came for too long",
    CloseCode.REPLACED: "a newer session took this one's place",
    CloseCode.TOO_LARGE: "a message was too long",
    CloseCode.VERSION: "the two ends speak different versions",
    CloseCode.OVERLOADED: "too many want the same",
}

MAX_REASON_BYTES = 123  # RFC 6455 section 5.5: a control frame carries 125 bytes, two of them the code


def may_reconnect(code: int) -> bool:
    """Say whether a client may reconnect after a session ended with `code`."""
    return code not in FATAL


def in_words(code: int, reason: str) -> str:
    """Say why a session ended; numbers are for machines."""
    return reason or WORDS.get(code, "the connection broke")


def clip_reason(reason: str) -> str:
    """Shorten `reason` to what a close frame can carry, without cutting a character in half."""
    return reason.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
