"""For all tests: the event loop of relay, backbone and node; property tests that no busy machine fails."""

import asyncio
import sys
from collections.abc import Callable, Mapping

from hypothesis import HealthCheck, settings

# How fast inputs are made says how busy a machine is: the first text in a fresh clone makes tables.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("any machine")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give uvloop where it exists: its timers, transports and errors are not always asyncio's."""
    if sys.platform == "win32":
        return {"asyncio": asyncio.new_event_loop}
    import uvloop

    return {"uvloop": uvloop.new_event_loop}
