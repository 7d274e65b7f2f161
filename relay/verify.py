"""
Serve the page that recomputes a recorded call (`/verify`), its wheel, and Pyodide from a folder.

Nothing of it belongs to the page of a node: no other file links it, and only these paths have a policy that
lets scripts come from elsewhere. The wheel is part of this package; Pyodide is not: it comes from
`pyodide_dir` (the npm package `pyodide` of PYODIDE_VERSION, unpacked) or, without one, from its makers'
content network: five files of that version, nothing else of that host. What a worker imports carries no hash.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from relay import assets

PYODIDE_VERSION = "0.29.5"  # what the wheel is built for and tested in: wasm/pyodide/package.json
CDN_URL = f"https://cdn.jsdelivr.net/pyodide/v{PYODIDE_VERSION}/full/"
WHEEL = "expertswarm_verify-*.whl"
PYODIDE_FILES = (
    "pyodide.mjs",
    "pyodide.asm.js",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)


def policy(foreign: str = "") -> str:
    """The page's content security policy; `foreign`: the folder at another host that has Pyodide's files."""
    text = assets.CONTENT_SECURITY_POLICY
    if foreign:
        scripts = [foreign + name for name in PYODIDE_FILES if name.endswith("js")]
        text = text.replace("script-src 'self'", " ".join(["script-src 'self'", *scripts]))
        data = [foreign + name for name in PYODIDE_FILES]
        text = text.replace("connect-src 'self'", " ".join(["connect-src 'self'", *data]))
    return text


def find_wheel() -> Path | None:
    """Return the wheel of codec and kernel, or None: a checkout may lack it (`make setup`)."""
    return next(iter(sorted(assets.BUILT.glob(WHEEL))), None)


def routes(pyodide_dir: Path | None) -> list[Route]:
    """Return the routes; they must stand before those of the page."""
    folder = assets.page_folder()
    headers = assets.HEADERS | {"content-security-policy": policy("" if pyodide_dir else CDN_URL)}

    def page(request: Request) -> Response:
        return assets.file_response(request, folder / "verify.html", headers)

    def script(request: Request) -> Response:
        path = assets.find_page_file(folder, f"src/verify/{request.path_params['name']}")
        return assets.file_response(request, path, headers)

    def setup(_: Request) -> Response:
        wheel = find_wheel()
        found = {
            "pyodide": "/pyodide/" if pyodide_dir else CDN_URL,
            "version": PYODIDE_VERSION,
            "wheel": None if wheel is None else f"/verify/{wheel.name}",
            "missing": missing(pyodide_dir, wheel),
        }
        return JSONResponse(found, headers=headers | {"cache-control": "no-store"})

    def wheel(request: Request) -> Response:
        path = find_wheel()
        asked = request.path_params["name"]
        return assets.file_response(request, path if path and path.name == asked else None, headers)

    def pyodide(request: Request) -> Response:
        name = request.path_params["name"]
        good = pyodide_dir is not None and name in PYODIDE_FILES and (pyodide_dir / name).is_file()
        return assets.file_response(request, pyodide_dir / name if pyodide_dir and good else None, headers)

    return [
        Route("/verify", page),
        Route("/verify/setup.json", setup),
        Route("/verify/{name}", wheel),
        Route("/src/verify/{name}", script),
        Route("/pyodide/{name}", pyodide),
    ]


def missing(pyodide_dir: Path | None, wheel: Path | None) -> list[str]:
    """Say what this relay lacks to serve the page, in words for whoever runs it."""
    lacks = []
    if wheel is None:
        lacks.append("the wheel of codec and kernel: `make setup` builds it")
    if pyodide_dir is not None:
        absent = [name for name in PYODIDE_FILES if not (pyodide_dir / name).is_file()]
        if absent:
            lacks.append(f"files of Pyodide in its folder: {', '.join(absent)}")
    return lacks
