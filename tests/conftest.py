"""Asynchronous tests run on the event loop that relay, backbone and node run on."""

import asyncio
import sys
from collections.abc import Callable, Mapping


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give uvloop where it exists: its timers, transports and errors are not always asyncio's."""
    if sys.platform == "win32":
        return {"asyncio": asyncio.new_event_loop}
    import uvloop

    return {"uvloop": uvloop.new_event_loop}
