"""Slices over HTTP: taken from backbones only, verified, asked for once, served by range."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx

from relay.config import Config
from relay.server import RelayServer
from relay.wire.messages import SliceWanted
from tests.fakes.peers import Backbone, Node, run, slice_data, slice_name

CONFIG = Config(host="127.0.0.1", port=0, slice_wait_s=0.4, drain_s=0.1)
NAME, DATA = slice_name(0, 0), slice_data(0, 0)


def test_slice_is_asked_of_the_backbone_once_however_many_wait_for_it() -> None:
    async def test() -> None:
        async with (
            RelayServer(replace(CONFIG, slice_wait_s=5.0)) as relay,
            Backbone(relay) as backbone,
            httpx.AsyncClient() as http,
        ):
            await backbone.register()
            gets = [asyncio.create_task(http.get(f"{relay.url}/slices/{NAME}")) for _ in range(8)]
            wanted = await backbone.expect(SliceWanted)
            assert wanted.slice == NAME
            await asyncio.sleep(0.05)
            assert (await backbone.put(http, NAME, DATA)).status_code == 201
            for get in gets:
                answer = await get
                assert (answer.status_code, answer.content) == (200, DATA)
                assert "immutable" in answer.headers["cache-control"]
            assert not any(isinstance(event, SliceWanted) for event in backbone.seen)
            assert (await http.get(f"{relay.url}/slices/{NAME}")).content == DATA

    run(test)


def test_upload_of_other_bytes_is_refused_and_nothing_is_stored() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone, httpx.AsyncClient() as http:
            await backbone.register()
            answer = await backbone.put(http, NAME, slice_data(1, 1))
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "slice_corrupt")
            answer = await backbone.put(http, NAME, DATA + b"x")
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "slice_too_large")
            assert (await http.head(f"{relay.url}/slices/{NAME}")).status_code == 404

    run(test)


def test_upload_needs_the_session_of_a_backbone_that_has_the_slice() -> None:
    async def test() -> None:
        async with (
            RelayServer(CONFIG) as relay,
            Backbone(relay) as backbone,
            Node(relay) as node,
            httpx.AsyncClient() as http,
        ):
            await backbone.register()
            await node.offer()
            url = f"{relay.url}/slices/{NAME}"
            for header in ("", "Bearer", "Bearer wrong", f"Bearer {node.session.welcome.session}"):
                answer = await http.put(url, content=DATA, headers={"authorization": header})
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "auth")
            answer = await backbone.put(http, "f" * 64, b"anything")
            assert "not in the manifest" in answer.json()["error"]["message"]

    run(test)


def test_ranges_and_heads_and_revalidation() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone, httpx.AsyncClient() as http:
            await backbone.register()
            await backbone.put(http, NAME, DATA)
            url = f"{relay.url}/slices/{NAME}"

            part = await http.get(url, headers={"range": "bytes=10-19"})
            assert (part.status_code, part.content) == (206, DATA[10:20])
            assert part.headers["content-range"] == f"bytes 10-19/{len(DATA)}"
            tail = await http.get(url, headers={"range": f"bytes={len(DATA) - 5}-"})
            assert tail.content == DATA[-5:]
            beyond = await http.get(url, headers={"range": f"bytes={len(DATA)}-"})
            assert beyond.status_code == 416
            assert beyond.headers["content-range"] == f"bytes */{len(DATA)}"
            head = await http.head(url)
            assert (head.status_code, head.headers["content-length"]) == (200, str(len(DATA)))
            assert head.headers["etag"] == f'"{NAME}"' and head.headers["accept-ranges"] == "bytes"
            same = await http.get(url, headers={"if-none-match": head.headers["etag"]})
            assert (same.status_code, same.content) == (304, b"")

    run(test)


def test_absent_slice_says_why() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, httpx.AsyncClient() as http:
            url = f"{relay.url}/slices/{NAME}"
            answer = await http.get(url)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "slice_unknown")
            assert "no connected backbone has it" in answer.json()["error"]["message"]
            async with Backbone(relay) as backbone:
                await backbone.register()
                await asyncio.sleep(0.05)
                answer = await http.get(url)
                assert (answer.status_code, answer.json()["error"]["code"]) == (504, "slice_timeout")
                assert "'home' was asked and did not deliver it within 0.4 s" in answer.text
            assert (await http.get(f"{relay.url}/slices/nonsense")).status_code == 404

    run(test)


def test_whoever_waits_hears_at_once_when_the_backbone_leaves() -> None:
    async def test() -> None:
        async with RelayServer(replace(CONFIG, slice_wait_s=20.0)) as relay, httpx.AsyncClient() as http:
            async with Backbone(relay) as backbone:
                await backbone.register()
                get = asyncio.create_task(http.get(f"{relay.url}/slices/{NAME}"))
                await backbone.expect(SliceWanted)
            answer = await get
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "slice_unknown")

    run(test)


def test_only_so_many_may_wait() -> None:
    async def test() -> None:
        config = replace(CONFIG, slice_waiters=1)
        async with RelayServer(config) as relay, Backbone(relay) as backbone, httpx.AsyncClient() as http:
            await backbone.register()
            first = asyncio.create_task(http.get(f"{relay.url}/slices/{NAME}"))
            await backbone.expect(SliceWanted)
            answer = await http.get(f"{relay.url}/slices/{slice_name(1, 1)}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert int(answer.headers["retry-after"]) >= 0
            assert (await first).status_code == 504

    run(test)


def test_nodes_fetch_a_whole_model_through_the_cache() -> None:
    async def test() -> None:
        config = replace(CONFIG, slice_wait_s=5.0)
        async with RelayServer(config) as relay, Backbone(relay) as backbone, httpx.AsyncClient() as http:
            await backbone.register()
            uploads = asyncio.create_task(backbone.upload_what_is_wanted(http))
            for number in (1, 2):
                async with Node(relay, number) as node:
                    await node.offer()
                    await node.serve()
                    for layer in node.assign.layers:
                        for expert, name in layer.experts.items():
                            answer = await http.get(f"{relay.url}/slices/{name}")
                            assert answer.content == slice_data(layer.layer, expert)
            assert sorted(backbone.wanted) == sorted(slice_name(n, e) for n in (0, 1) for e in (0, 1))
            uploads.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await uploads

    run(test)


def test_a_stuck_backbone_hides_no_healthy_one_and_a_504_forgets_nothing() -> None:
    async def test() -> None:
        config = replace(CONFIG, slice_wait_s=1.0)
        async with (
            RelayServer(config) as relay,
            Backbone(relay, 1001) as stuck,
            httpx.AsyncClient(timeout=20) as http,
        ):
            await stuck.register()
            await asyncio.sleep(0.05)
            for _ in range(3):
                assert (await http.get(f"{relay.url}/slices/{NAME}")).status_code == 504
            await stuck.expect(SliceWanted)
            assert not any(isinstance(event, SliceWanted) for event in stuck.seen), "asked once"
            async with Backbone(relay, 1002) as healthy:
                await healthy.register()
                uploads = asyncio.create_task(healthy.upload_what_is_wanted(http))
                answer = await http.get(f"{relay.url}/slices/{NAME}")
                while answer.status_code == 504:
                    answer = await http.get(f"{relay.url}/slices/{NAME}")
                assert answer.content == DATA
                uploads.cancel()
                await asyncio.gather(uploads, return_exceptions=True)

    run(test)


def test_upload_that_breaks_off_is_asked_for_again_at_once() -> None:
    async def test() -> None:
        config = replace(CONFIG, slice_wait_s=10.0)
        async with RelayServer(config) as relay, Backbone(relay) as backbone, httpx.AsyncClient() as http:
            await backbone.register()
            get = asyncio.create_task(http.get(f"{relay.url}/slices/{NAME}"))
            await backbone.expect(SliceWanted)

            async def half() -> AsyncIterator[bytes]:
                yield DATA[:10]
                raise ConnectionError("the line broke")

            with contextlib.suppress(ConnectionError):
                bearer = {"authorization": f"Bearer {backbone.welcome.session}"}
                await http.put(f"{relay.url}/slices/{NAME}", content=half(), headers=bearer)
            await backbone.expect(SliceWanted)
            await backbone.put(http, NAME, DATA)
            assert (await get).content == DATA

    run(test)
