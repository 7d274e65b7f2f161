"""
Share the event loop between peers by time: what one sends in bulk delays others by a millisecond or two.

A socket's bytes go through an Inlet. While its owner's account has time left they are worked on at once, as
they come; that is how a call crosses the relay. Otherwise, and as soon as one read took its QUANTUM_S, the
rest waits: the socket is not read meanwhile (so it is bounded, and TCP slows the sender), and all that wait
take turns, one small piece each, TURN_S of each turn of the loop. Pieces are cut so that each takes about
PIECE_S, whatever is in it: bytes of one long frame or a thousand short ones. Nobody is slowed while nobody
else wants the time.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

from relay.bucket import Bucket

QUANTUM_S = 0.001
TURN_S = 0.001
PIECE_S = 0.0003
PIECE_BYTES = (1 << 10, 256 << 10)
FIRST_PIECE_BYTES = 16 << 10

# Seconds of the loop a second, and at once, without waiting for a turn. Strangers share one account.
SHARES = {"stranger": (0.1, 0.05), "node": (0.05, 0.02), "backbone": (1.0, 0.5)}


def account(role: str) -> Bucket:
    """Open an account for a peer of this role."""
    return Bucket(*SHARES[role], perf_counter())


class Turns:
    """Who waits for a turn."""

    __slots__ = ("_ring", "_scheduled", "strangers")

    def __init__(self) -> None:
        self.strangers = account("stranger")
        self._ring: deque[Inlet] = deque()
        self._scheduled = False

    def wait(self, inlet: "Inlet") -> None:
        """Give this one turns until it says that nothing is left."""
        self._ring.append(inlet)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        until = perf_counter() + TURN_S
        ring = self._ring
        while ring:
            inlet = ring.popleft()
            if inlet.step():
                ring.append(inlet)
            if perf_counter() >= until:
                break
        self._scheduled = bool(ring)
        if ring:
            asyncio.get_running_loop().call_soon(self._turn)


class Inlet:
    """
    What one socket received and nobody worked on yet.

    work: takes bytes in order; it may call `hold`. read: told True to read on, False to stop reading.
    """

    __slots__ = ("_held", "_piece", "_queued", "_read", "_reading", "_rest", "_turns", "_work", "account")

    def __init__(self, turns: Turns, work: Callable[[bytes], None], read: Callable[[bool], None]) -> None:
        self.account = turns.strangers
        self._turns = turns
        self._work = work
        self._read = read
        self._rest = b""
        self._piece = FIRST_PIECE_BYTES
        self._held = False  # the owner takes nothing at the moment
        self._queued = False
        self._reading = True

    def feed(self, data: bytes) -> None:
        """Take what the socket received."""
        started = perf_counter()
        if self._rest or self._held or self.account.left(started) <= 0:
            self._rest = self._rest + data if self._rest else data
        else:
            done = 0
            while True:
                took, done = self._one(data, done)
                if done >= len(data):
                    break
                if self._held or self.account.left(started) <= 0 or perf_counter() - started > QUANTUM_S:
                    self._rest = data[done:]
                    break
        self._arrange()

    def hold(self) -> None:
        """Work on nothing for now."""
        self._held = True
        self._arrange()

    def release(self) -> None:
        """Go on."""
        self._held = False
        self._arrange()

    def close(self) -> None:
        """Forget what is left; nothing comes any more."""
        self._rest = b""

    def step(self) -> bool:
        """Take a turn; True when another is needed."""
        if self._rest and not self._held:
            data = self._rest
            _, done = self._one(data, 0)
            if self._rest is data:  # not closed meanwhile
                self._rest = data[done:]
        self._queued = bool(self._rest) and not self._held
        self._arrange()
        return self._queued

    def _one(self, data: bytes, at: int) -> tuple[float, int]:
        """Work on one piece; give how long it took and where the next one begins."""
        piece = data if not at and len(data) <= self._piece else data[at : at + self._piece]
        started = perf_counter()
        self._work(piece)
        took = perf_counter() - started
        self.account.spend(started, took)
        least, most = PIECE_BYTES
        if took > PIECE_S:
            self._piece = max(least, self._piece // 2)
        elif len(piece) == self._piece:
            self._piece = min(most, self._piece * 2)
        return took, at + len(piece)

    def _arrange(self) -> None:
        reading = not self._rest and not self._held
        if reading is not self._reading:
            self._reading = reading
            self._read(reading)
        if self._rest and not self._held and not self._queued:
            self._queued = True
            self._turns.wait(self)
