"""Let pages of any origin ask: answers preflights, and puts the headers of auth.CORS on every response."""

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from backbone.gateway.auth import CORS, PREFLIGHT


class Cors:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":
            await send({"type": "http.response.start", "status": 204, "headers": _raw(PREFLIGHT)})
            await send({"type": "http.response.body", "body": b""})
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), *_raw(CORS)]}
            await send(message)

        await self._app(scope, receive, with_headers)


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
