"""For all tests: the event loop that relay, backbone and node run on; tables that property tests need."""

import asyncio
import sys
from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="session", autouse=True)
def unicode_tables() -> None:
    """The first text in a fresh clone makes them, for seconds: no test shall be judged by that."""

    @settings(max_examples=1, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.text())
    def first_text(_: str) -> None: ...

    first_text()


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give uvloop where it exists: its timers, transports and errors are not always asyncio's."""
    if sys.platform == "win32":
        return {"asyncio": asyncio.new_event_loop}
    import uvloop

    return {"uvloop": uvloop.new_event_loop}
