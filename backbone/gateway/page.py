"""The chat page at `/`: one file that asks nobody but this door. A small page before it asks for the key."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse

HERE = Path(__file__).parent


def chat() -> HTMLResponse:
    return _page("chat.html", 200)


def ask_for_key() -> HTMLResponse:
    """A page that fetches `/` with the key that is typed in, and becomes what comes."""
    return _page("key.html", 401)


def _page(name: str, status: int) -> HTMLResponse:
    text, policy = _read(name)
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(text, status_code=status, headers=headers)


@cache
def _read(name: str) -> tuple[str, str]:
    """Give a page and the policy that allows its own script and style, and the chat's after the key's."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for each in ("chat.html", "key.html"):
        text = (HERE / each).read_text()
        for kind, found in hashes.items():
            for inside in re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL):
                digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
                found.append(f"'sha256-{digest}'")
    policy = (
        "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; "
        f"script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}"
    )
    return (HERE / name).read_text(), policy
