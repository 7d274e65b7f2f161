"""
Notice that this machine's network is another now: by the address it would use to reach a host.

Asking the routing table costs two system calls and sends nothing; netlink would say it sooner, but only on
Linux. What is lost with the old network, the links' beats and the session with the relay notice; this is
for what only becomes possible with the new one, while the session goes on.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

LOOK_S = 3.0


async def address_towards(host: str, port: int) -> str | None:
    """Give the local address from which that host is reached, None while there is no way."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])  # UDP: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None


async def watch(
    look: Callable[[], Awaitable[str | None]], on_change: Callable[[], None], every_s: float = LOOK_S
) -> None:
    """Call `on_change` whenever there is a way and it is another than before; runs until cancelled."""
    known = await look()
    while True:
        await asyncio.sleep(every_s)
        found = await look()
        if found is not None and found != known:
            if known is not None:
                on_change()
            known = found
