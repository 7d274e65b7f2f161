"""
What sealing a frame costs each end: seal and open of sizes that travel, in Python, node and Chromium.

The baseline is the same frame's way without a seal: written and read. A call is sealed and opened once each
way, so a round trip pays about twice what stands here. In a page WebCrypto works on another thread; what it
costs there is mostly the way to it and back.
"""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from table import Row, arguments, report
from wasm_rows import node_program

from relay.wire.frames import Frame, FrameType, decode_header
from relay.wire.seal import NodeHandshake, Seal, SealIdentity, answer_hello

SIZES_KB = (6, 12, 24, 100)
RUNS = 400
HERE = Path(__file__).parent
ROOT = HERE.parent


def pair() -> tuple[Seal, Seal]:
    node, backbone = SealIdentity.from_seed(bytes(32)), SealIdentity.from_seed(bytes([1]) * 32)
    handshake = NodeHandshake(node, 7, backbone.public, bytes([2]) * 32)
    answer, ours = answer_hello(backbone, 7, handshake.hello, bytes([3]) * 32)
    return handshake.finish(answer), ours


def in_python(size_kb: int) -> Row:
    node, backbone = pair()
    frame = Frame(FrameType.DISPATCH, bytes(size_kb << 10), 5, 77, 7, 1000)
    plain, sealed, opened = [], [], []
    for _ in range(RUNS):
        at = perf_counter()
        data = frame.encode()
        decode_header(data)
        encoded = perf_counter()
        closed = backbone.seal(data)
        ready = perf_counter()
        node.open(decode_header(closed), closed)
        plain.append(encoded - at)
        sealed.append(ready - encoded)
        opened.append(perf_counter() - ready)
    return row("python", size_kb, *(median(times) * 1e6 for times in (sealed, opened, plain)))


def row(where: str, size_kb: int, seal_us: float, open_us: float, plain_us: float) -> Row:
    both = seal_us + open_us
    return dict(where=where, size_kb=size_kb, seal_us=seal_us, open_us=open_us, plain_us=plain_us,
                mb_per_s=2 * (size_kb << 10) / both)  # fmt: skip


def in_node() -> list[Row]:
    there = json.dumps((HERE / "seal_timing.js").as_uri())
    script = f"import {{ measure }} from {there};"
    script += f"console.log(JSON.stringify(await measure({list(SIZES_KB)}, {RUNS})))"
    command = [node_program(), "--input-type=module", "-e", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [row("node", **each) for each in json.loads(found.stdout)]


async def in_chromium() -> list[Row]:
    """Measure in a worker of a page, as a node runs; none where there is no Chromium."""
    path = shutil.which("chromium")
    if path is None:
        return []
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = await browser.new_page()

        async def serve(route: Any) -> None:
            file = ROOT / route.request.url.partition("127.0.0.1:9/")[2]
            kind = "text/html" if file.is_dir() else "text/javascript"
            await route.fulfill(body=b"" if file.is_dir() else file.read_bytes(), content_type=kind)

        await page.context.route("**/*", serve)
        await page.goto("http://127.0.0.1:9/")
        found: list[dict[str, Any]] = await page.evaluate(
            """async ([sizes, runs]) => {
              const text = `import { measure } from 'http://127.0.0.1:9/bench/seal_timing.js';
                postMessage(await measure(${JSON.stringify(sizes)}, ${runs}));`;
              const url = URL.createObjectURL(new Blob([text], { type: 'text/javascript' }));
              const worker = new Worker(url, { type: 'module' });
              return new Promise((done, failed) => {
                worker.onmessage = ({ data }) => done(data);
                worker.onerror = (event) => failed(new Error(event.message));
              });
            }""",
            [list(SIZES_KB), RUNS],
        )
        await browser.close()
        return [row("chromium worker", **each) for each in found]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows = [in_python(size_kb) for size_kb in SIZES_KB] + in_node() + asyncio.run(in_chromium())
    title = f"Sealing one frame, medians of {RUNS} (AES-256-GCM; 24 bytes more on the wire)"
    report(title, rows, options.json)


if __name__ == "__main__":
    main()
