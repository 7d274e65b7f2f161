"""A relay that was away for long is back: tab, headless node and backbone serve within seconds of it."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from time import monotonic

from backbone.experts.native import NativeKernel
from backbone.node.client import ClientConfig
from e2e.browser.tab import Tab, chromium
from relay.config import Config
from relay.server import RelayServer
from tests.fakes.linked import LinkedBackbone, running_node
from tests.fakes.model import RandomModel

MODEL = RandomModel.make(layers=3, experts=4, hidden_dim=96, expert_dim=64)
KERNEL = NativeKernel()
AWAY_S = 20.0  # long enough for waits to reach their cap, and for a browser to slow down sockets that fail
BACK_S = 5.0


async def test_all_serve_within_five_seconds_of_the_relays_return(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        config = Config(host="127.0.0.1", port=0, cache_dir=tmp_path, drain_s=0.2)
        relay = await stack.enter_async_context(RelayServer(config))
        backbone = LinkedBackbone(relay.url, relay.backbone_token, MODEL, KERNEL)
        await stack.enter_async_context(backbone.running())
        whole = len(MODEL.by_id) * KERNEL.packed_bytes(MODEL.formula)
        headless = ClientConfig(relay.url, whole, "headless")
        await stack.enter_async_context(running_node(headless, KERNEL))
        tab = await Tab.open(await stack.enter_async_context(chromium()), relay.url)
        await backbone.until_ready(2)
        await tab.wait_for(state="serving")
        again = replace(config, port=relay.port, backbone_token=relay.backbone_token)
        await relay.kill()
        await tab.wait_for(state="connecting")
        await asyncio.sleep(AWAY_S)
        await stack.enter_async_context(RelayServer(again))
        back = monotonic()
        await backbone.until_ready(2)
        await tab.wait_for(state="serving")
        took_s = monotonic() - back
        await backbone.ask(1)
        assert took_s < BACK_S, f"{took_s:.1f} s"
        print(f"serving {took_s:.1f} s after the relay's return")
