"""Who may ask: API keys as OpenAI's and Anthropic's clients send them, and what browsers may do. Pure."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from backbone.gateway.errors import Refused

MAX_KEY_CHARS = 1024

# Any page may ask: a key is sent by the page itself, never by the browser on its own, so a page without the
# key gets no further than a stranger without a browser.
CORS = {
    "access-control-allow-origin": "*",
    "access-control-expose-headers": "retry-after",
}
PREFLIGHT = CORS | {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "*, authorization",  # the star does not include it
    "access-control-max-age": "600",
}


def key_in(headers: Mapping[str, str]) -> str:
    """Give the key a request carries, "" where there is none: `Authorization: Bearer` or `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    found = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
    return found[:MAX_KEY_CHARS]


def require_key(headers: Mapping[str, str], api_keys: Sequence[str]) -> None:
    """
    Check the key; without `api_keys` everybody may ask.

    Raises:
        Refused: 401.
    """
    if not api_keys:
        return
    key = key_in(headers).encode()
    matches = [hmac.compare_digest(key, known.encode()) for known in api_keys]
    if not key or not any(matches):
        message = "this backbone needs an API key: Authorization: Bearer KEY, or x-api-key: KEY"
        raise Refused(401, "invalid_api_key", message)


def client_of(headers: Mapping[str, str], address: str) -> str:
    """Name whose turn it is in the line: one who asks much does not push others back."""
    return hashlib.sha256(f"{key_in(headers)} {address}".encode()).hexdigest()[:16]
