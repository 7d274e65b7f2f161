"""
The line in front of the engine: as many requests run as it has slots, the others wait their turn here.

Who waits here costs no slot, no thread and no node, and can leave at any moment. Turns go round among
clients, so one who asks much pushes nobody back. Bounded in requests and bytes; who finds it full is told
when to come back. One event loop.
"""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from backbone.gateway.errors import Busy, Refused

MAX_WAITING = 64
MAX_WAITING_OF_ONE = 48
MAX_WAITING_BYTES = 128 << 20
MAX_WAIT_S = 1800.0
RETRY_S = (1, 60)
FIRST_GUESS_S = 5.0  # how long a request takes, before one was seen


@dataclass(slots=True, eq=False)
class _Waiter:
    seats: int
    size_bytes: int
    turn: asyncio.Future[None]


class Line:
    """`async with line.turn(...)`: inside, the request has its seats."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.free = seats
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()  # by client; first is next
        self._mean_s = FIRST_GUESS_S

    @property
    def waiting(self) -> int:
        return sum(len(waiters) for waiters in self._waiting.values())

    def must_wait(self, seats: int) -> bool:
        """Tell whether a request would have to wait if it came now."""
        return self.free < min(seats, self.seats) or bool(self._waiting)

    def check_room(self, client: str, size_bytes: int) -> None:
        """
        Raises:
            Busy: too many wait already, altogether or of this client.
        """
        held = sum(waiter.size_bytes for waiters in self._waiting.values() for waiter in waiters)
        own = len(self._waiting.get(client, ()))
        if self.waiting >= MAX_WAITING or own >= MAX_WAITING_OF_ONE or held + size_bytes > MAX_WAITING_BYTES:
            raise Busy(f"{self.waiting} requests wait already", self.retry_after_s())

    def retry_after_s(self) -> int:
        """Guess when there is room again."""
        return min(max(math.ceil(self._mean_s / self.seats), RETRY_S[0]), RETRY_S[1])

    @asynccontextmanager
    async def turn(self, client: str, seats: int = 1, size_bytes: int = 0) -> AsyncIterator[None]:
        """
        Wait for a turn and hold it; whoever is cancelled meanwhile leaves at once.

        Raises:
            Busy: the line is full. Refused: 503 after MAX_WAIT_S.
        """
        seats = min(seats, self.seats)
        if self.must_wait(seats):
            await self._wait(client, seats, size_bytes)
        else:
            self.free -= seats
        began = monotonic()
        try:
            yield
        finally:
            self._mean_s += 0.2 * (monotonic() - began - self._mean_s)
            self.free += seats
            self._next()

    async def _wait(self, client: str, seats: int, size_bytes: int) -> None:
        self.check_room(client, size_bytes)
        waiter = _Waiter(seats, size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, deque()).append(waiter)
        try:
            await asyncio.wait_for(asyncio.shield(waiter.turn), MAX_WAIT_S)
        except TimeoutError:
            if waiter.turn.done():
                self.free += seats
            message = f"no turn within {MAX_WAIT_S:.0f} s"
            raise Refused(503, "overloaded", message, self.retry_after_s()) from None
        except asyncio.CancelledError:
            if waiter.turn.done():  # the turn came in the moment it left
                self.free += seats
            raise
        finally:
            self._leave(client, waiter)
            self._next()

    def _leave(self, client: str, waiter: _Waiter) -> None:
        waiters = self._waiting.get(client)
        if waiters is not None and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[client]

    def _next(self) -> None:
        """Give turns while there are seats for the one whose turn it is; nobody overtakes a large one."""
        while self._waiting:
            client, waiters = next(iter(self._waiting.items()))
            waiter = waiters[0]
            if waiter.seats > self.free:
                return
            waiters.popleft()
            self._waiting.move_to_end(client)
            if not waiters:
                del self._waiting[client]
            self.free -= waiter.seats
            waiter.turn.set_result(None)
