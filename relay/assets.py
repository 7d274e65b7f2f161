"""
Find and serve the page and its kernels: from the installed package, or from a checkout beside it.

Files are read per request and revalidated by ETag, so that an upgrade (or an edit) shows at the next reload.
"""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PACKAGE = Path(__file__).resolve().parent
BUILT = PACKAGE / "_built"  # written by hatch_build.py
CHECKOUT_PAGE = PACKAGE.parent / "node-web"

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/vnd.microsoft.icon",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".wgsl": "text/plain; charset=utf-8",
    ".whl": "application/zip",
    ".zip": "application/zip",
}

# Scripts come from here only; WebAssembly may be compiled; sockets may go to any backbone and relay.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'wasm-unsafe-eval'",
        "connect-src 'self' ws: wss:",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_folder() -> Path:
    """Return the folder of the page: the built one, else the checkout's."""
    built = BUILT / "page"
    return built if (built / "index.html").is_file() else CHECKOUT_PAGE


def find_page_file(folder: Path, name: str) -> Path | None:
    """Return the file of the page with this URL path, or None: only what the page consists of is served."""
    if name in ("", "index.html", "manifest.webmanifest"):
        path = folder / (name or "index.html")
    elif name.startswith("src/"):
        path = folder / name
    else:
        return None
    return _inside(path, folder)


def find_kernel(name: str) -> Path | None:
    """Return the file of a kernel, or None."""
    return _inside(BUILT / name, BUILT) if name.endswith(".wasm") and "/" not in name else None


def _inside(path: Path, folder: Path) -> Path | None:
    try:
        path = path.resolve()
        good = path.is_relative_to(folder.resolve()) and path.suffix in MEDIA_TYPES and path.is_file()
    except (ValueError, OSError):  # a name that no file can have
        return None
    return path if good else None


def file_response(request: Request, path: Path | None, base_headers: dict[str, str] = HEADERS) -> Response:
    """Answer with the file, with 304 if the browser has it, or with 404."""
    if path is None:
        return Response("not found\n", 404, base_headers, "text/plain")
    data = path.read_bytes()
    etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = base_headers | {"etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers | {"content-type": MEDIA_TYPES[path.suffix]})


def routes() -> list[Route]:
    """Return the routes of page and kernels; they match last."""
    folder = page_folder()

    def page(request: Request) -> Response:
        return file_response(request, find_page_file(folder, request.path_params.get("name", "")))

    def kernel(request: Request) -> Response:
        return file_response(request, find_kernel(request.path_params["name"]))

    return [
        Route("/kernels/{name}", kernel),
        Route("/", page),
        Route("/{name:path}", page),
    ]
