"""What people and monitors see of a relay: page, kernels, health, metrics, status, QR code."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from relay import assets, verify
from relay import status as relay_status
from relay.config import Config
from relay.server import RelayServer
from relay.wire.messages import PathReport, PathState
from tests.fakes.peers import Backbone, Node, run

CONFIG = Config(host="127.0.0.1", port=0, drain_s=0.1)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page folder with secrets around it."""
    folder = tmp_path / "page"
    (folder / "src" / "ui").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>hello")
    (folder / "manifest.webmanifest").write_text("{}")
    (folder / "src" / "main.js").write_text("export {};")
    (folder / "src" / "notes.md").write_text("not for serving")
    (folder / "package.json").write_text("{}")
    (tmp_path / "secret.js").write_text("secret")
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "expert.wasm").write_bytes(b"\0asm")
    monkeypatch.setattr(assets, "BUILT", tmp_path / "built")
    monkeypatch.setattr(assets, "CHECKOUT_PAGE", folder)
    return folder


def test_page_and_kernel_are_served_with_type_policy_and_revalidation(page: Path) -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, httpx.AsyncClient(base_url=relay.url) as http:
            for path, media_type in [
                ("/", "text/html; charset=utf-8"),
                ("/index.html", "text/html; charset=utf-8"),
                ("/manifest.webmanifest", "application/manifest+json"),
                ("/src/main.js", "text/javascript; charset=utf-8"),
                ("/kernels/expert.wasm", "application/wasm"),
            ]:
                answer = await http.get(path)
                assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
                assert "'wasm-unsafe-eval'" in answer.headers["content-security-policy"]
                assert answer.headers["x-content-type-options"] == "nosniff"
                same = await http.get(path, headers={"if-none-match": answer.headers["etag"]})
                assert same.status_code == 304
            (page / "src" / "main.js").write_text("export const changed = 1;")
            assert "changed" in (await http.get("/src/main.js")).text

    run(test)


@pytest.mark.parametrize(
    "path",
    [
        "/package.json",
        "/src/notes.md",
        "/src/../package.json",
        "/src/%2e%2e/%2e%2e/secret.js",
        "/src/..%2f..%2fsecret.js",
        "/src//etc/passwd",
        "/src/",
        "/src/nothing.js",
        "/kernels/other.wasm",
        "/kernels/..%2f..%2fsecret.js",
        "/nothing",
    ],
)
def test_nothing_but_the_page_is_served(page: Path, path: str) -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, httpx.AsyncClient(base_url=relay.url) as http:
            assert (await http.get(path)).status_code == 404

    run(test)


def test_page_of_this_checkout_is_found() -> None:
    assert (assets.page_folder() / "index.html").is_file()


def test_health_status_and_metrics_tell_who_is_here() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, httpx.AsyncClient(base_url=relay.url) as http:
            assert (await http.get("/healthz")).json()["status"] == "ok"
            async with Backbone(relay) as backbone, Node(relay) as node:
                await backbone.register()
                await node.offer()
                await node.serve()
                await backbone.nodes(1)
                answer = await http.get("/status.json")
                status = answer.json()
                assert status["nodes"][0]["slices_ready"] == 4
                assert status["nodes"][0]["backbone"] == status["backbones"][0]["peer"]
                for private in (node.hello.secret, backbone.hello.secret, node.hello.id):
                    assert private not in answer.text
                for session in (node.session, backbone.session):
                    assert session.welcome.session not in answer.text
                assert relay.backbone_token not in answer.text
                metrics = (await http.get("/metrics")).text
                assert 'relay_sessions{role="node"} 1.0' in metrics
                assert 'relay_sessions{role="backbone"} 1.0' in metrics
            assert "relay_slice_cache_bytes 0.0" in metrics

    run(test)


def test_status_metrics_and_command_say_which_lane_carries_calls_why_and_since_when() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, httpx.AsyncClient(base_url=relay.url) as http:
            async with Backbone(relay) as backbone, Node(relay) as node:
                await backbone.register()
                await node.offer()
                await node.serve()
                await backbone.nodes(1)
                name = node.hello.id[:8]
                assert (
                    f'relay_node_lane{{lane="relayed",node="{name}"}} 1.0'
                    in (await http.get("/metrics")).text
                )
                peer = (await http.get("/status.json")).json()["nodes"][0]["peer"]
                for measured in (True, False):
                    times = (41.0, 44.5) if measured else (None, None)
                    report = PathState(peer, "webrtc", "faster by half", 30.0 if measured else 0.0, *times)
                    backbone.session.send_path_report(PathReport((report,)))
                    await backbone.flush()
                    out = io.StringIO()
                    while "webrtc" not in out.getvalue() or ("44.5" in out.getvalue()) != measured:
                        out = io.StringIO()
                        assert await asyncio.to_thread(relay_status.run, relay.url, out) == 0
                    (line,) = [line for line in out.getvalue().splitlines() if "webrtc" in line]
                    said = "webrtc 41.0/44.5 30 faster by half" if measured else "webrtc - - faster by half"
                    assert " ".join(line.split()).endswith(said)
                    path = (await http.get(f"/lanes/{name}.json")).json()
                    assert (path["lane"], path["why"]) == ("webrtc", "faster by half")
                    (offered,) = (await http.get("/swarm.json")).json()["models"]
                    assert (offered["name"], offered["nodes"]) == (path["model"], 1)
                    assert offered["size_bytes"] > 0
                    assert (path["age_s"] or 0) >= (30 if measured else 0) and (
                        path["age_s"] is None
                    ) != measured
                    for nobody in ("ffffffff", name[:4]):
                        assert (await http.get(f"/lanes/{nobody}.json")).json() is None
                    metrics = (await http.get("/metrics")).text
                    assert f'relay_node_lane{{lane="webrtc",node="{name}"}} 1.0' in metrics
                    assert 'lane="relayed"' not in metrics
                    assert ("relay_node_lane_evidence_age_seconds{" in metrics) == measured

    run(test)


def test_status_command_names_what_is_no_relay(capsys: pytest.CaptureFixture[str]) -> None:
    assert relay_status.run("http://127.0.0.1:9", io.StringIO()) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_a_status_fits_its_terminal_and_shows_no_control_characters() -> None:
    node = {
        "name": "box\x1b[2J", "kernel": "native-avx2", "backbone": None, "paused": False,
        "slices_ready": 1, "slices_assigned": 2, "seal": {},
        "path": {"lane": "relayed", "why": "a long story " * 20, "age_s": None},
    }  # fmt: skip
    status = {
        "relay": "1", "draining": False, "sessions": 1, "open_calls": 0, "backbones": [], "nodes": [node] * 2,
    }  # fmt: skip
    relay_status.show(status, out := io.StringIO(), width=80)
    rows = out.getvalue().splitlines()
    assert max(map(len, rows[1:])) <= 80 and len(rows) == 6 and rows[3].startswith("    a long story")
    assert "\x1b" not in out.getvalue()
    relay_status.show(status, out := io.StringIO())
    assert len(out.getvalue().splitlines()) == 4, "a pipe gets one row for each node"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/src/%00", {}, 404),
        ("/src/" + "x" * 5000, {}, 404),
        ("/kernels/%00.wasm", {}, 404),
        ("/src/verify/%00.js", {}, 404),
        ("/verify/%00", {}, 404),
        ("/pyodide/%00", {}, 404),
        ("/lanes/%00.json", {}, 200),
        ("/qr.svg", {"host": "x" * 4000}, 400),
        ("/slices/%00", {}, 404),
    ],
)
def test_nonsense_is_answered_not_reported_as_our_fault(
    path: str, headers: dict[str, str], status: int
) -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, httpx.AsyncClient(base_url=relay.url) as http:
            assert (await http.get(path, headers=headers)).status_code == status

    run(test)


def test_qr_code_shows_the_public_url() -> None:
    async def test() -> None:
        for public_url in (None, "https://swarm.example"):
            config = Config(host="127.0.0.1", port=0, public_url=public_url, drain_s=0.1)
            async with RelayServer(config) as relay, httpx.AsyncClient(base_url=relay.url) as http:
                answer = await http.get("/qr.svg")
                assert answer.headers["content-type"] == "image/svg+xml" and "<svg" in answer.text

    run(test)


def test_two_relays_in_one_process_do_not_share_their_metrics() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as one, RelayServer(CONFIG) as two, Node(one) as node:
            await node.offer()
            async with httpx.AsyncClient() as http:
                assert 'role="node"' in (await http.get(f"{one.url}/metrics")).text
                assert 'role="node"' not in (await http.get(f"{two.url}/metrics")).text

    run(test)


def test_the_verifying_page_says_where_python_comes_from_and_only_it_may_load_it(
    page: Path, tmp_path: Path
) -> None:
    (page / "verify.html").write_text("<!doctype html>verify")
    (page / "src" / "verify").mkdir()
    (page / "src" / "verify" / "worker.js").write_text("export {};")
    (tmp_path / "built" / "expertswarm_verify-0.1.0-x.whl").write_bytes(b"PK")
    own = tmp_path / "pyodide"
    own.mkdir()
    (own / "pyodide.mjs").write_text("export {};")
    (own / "secret.txt").write_text("secret")

    async def test() -> None:
        async with RelayServer(CONFIG) as relay, httpx.AsyncClient(base_url=relay.url) as http:
            setup = (await http.get("/verify/setup.json")).json()
            assert setup["pyodide"].startswith("https://cdn.jsdelivr.net/pyodide/v") and not setup["missing"]
            assert (await http.get(setup["wheel"])).content == b"PK"
            for path in ("/verify", "/src/verify/worker.js"):
                allowed = (await http.get(path)).headers["content-security-policy"]
                foreign = [word for word in allowed.replace(";", " ").split() if "jsdelivr" in word]
                files = [verify.CDN_URL + name for name in verify.PYODIDE_FILES]
                assert set(foreign) == set(files), "a whole host may serve scripts"
            for path in ("/", "/src/main.js"):
                assert "jsdelivr" not in (await http.get(path)).headers["content-security-policy"]
            assert (await http.get("/pyodide/pyodide.mjs")).status_code == 404
        hosting = replace(CONFIG, pyodide_dir=own)
        async with RelayServer(hosting) as relay, httpx.AsyncClient(base_url=relay.url) as http:
            setup = (await http.get("/verify/setup.json")).json()
            assert setup["pyodide"] == "/pyodide/" and "pyodide.asm.wasm" in setup["missing"][0]
            assert "jsdelivr" not in (await http.get("/verify")).headers["content-security-policy"]
            assert (await http.get("/pyodide/pyodide.mjs")).status_code == 200
            for path in ("/pyodide/secret.txt", "/verify/kernel-plain.wasm", "/pyodide/..%2Fsecret.js"):
                assert (await http.get(path)).status_code == 404

    run(test)


def test_the_verifying_page_has_the_version_that_the_wheel_is_built_for() -> None:
    package = json.loads((Path(verify.__file__).parents[1] / "wasm/pyodide/package.json").read_text())
    assert package["dependencies"] == {"pyodide": verify.PYODIDE_VERSION}


def test_no_file_of_the_contributing_page_loads_the_verifying_one() -> None:
    folder = assets.page_folder()
    files = [folder / "index.html", *(folder / "src").rglob("*.js")]
    others = [path for path in files if "verify" not in path.parts]
    assert others and not [path for path in others if "verify/" in path.read_text()]


def test_status_says_who_is_who_and_what_the_relay_cannot_read() -> None:
    node = {"peer": 2, "name": "phone", "kernel": "wasm", "paused": False, "backbone": 1, "slices_ready": 2,
            "slices_assigned": 2, "path": {"lane": "relayed", "why": "first", "age_s": None}}  # fmt: skip
    backbone = {"peer": 1, "name": "home", "model_name": "tiny", "nodes": [2], "rtt_ms": None}
    whole = {"relay": "0", "draining": False, "sessions": 2, "open_calls": 0}
    for seal, said in [(True, "12ab-34cd yes"), (False, "12ab-34cd no"), (None, "12ab-34cd -")]:
        out = io.StringIO()
        nodes = [node | {"seal": {"identity": "12ab-34cd", "sealed": seal}}]
        relay_status.show(whole | {"nodes": nodes, "backbones": [backbone | {"seal": "ef56-7890"}]}, out)
        assert said in " ".join(out.getvalue().split()) and "key ef56-7890" in out.getvalue()
    out = io.StringIO()
    relay_status.show(whole | {"nodes": [node], "backbones": [backbone]}, out)  # of an older relay
    assert "does not seal" in out.getvalue()
