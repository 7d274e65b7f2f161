"""
What NAT this machine is behind, and whether a punch through it and another one need be tried.

Asked of the relay's STUN server when the relay is known, and kept. Behind a strict NAT the whole class takes
about a second, but most pairs do not depend on all of it: whoever asks about a pair waits no longer than that
pair needs.
"""

import asyncio
import json
import logging

from relay.nat.candidates import STRICTEST, NatClass, Observation, hopeless, strictest_class
from relay.nat.classify import classify

log = logging.getLogger(__name__)

CLASSIFY_S = 5.0  # the slowest round trips, each asked four times, take 4.5
CLASS_KEPT_S = 600.0  # a machine that moved is classified anew within this time


class NatWatch:
    """What NAT this machine is behind: `prepare` when the relay is known, `forget` when all may differ."""

    def __init__(self) -> None:
        self._asked: tuple[str, float] = ("", 0.0)
        self._task: asyncio.Task[NatClass | None] | None = None
        self._strictest = STRICTEST  # what it may still turn out to be
        self._stirred = asyncio.Event()

    def prepare(self, stun: str | None) -> None:
        """Begin to ask, unless the answer is known and fresh."""
        now = asyncio.get_running_loop().time()
        if stun is None or (self._asked[0] == stun and now - self._asked[1] < CLASS_KEPT_S):
            return
        self._asked = (stun, now)
        self._strictest = STRICTEST
        if self._task is not None:
            self._task.cancel()
        self._task = task = asyncio.create_task(self._classified(stun))
        task.add_done_callback(lambda _: self._stirred.set())

    async def look(self, stun: str | None) -> NatClass | None:
        """Give the class, None when nobody can tell; bounded in time."""
        self.prepare(stun)
        while (task := self._task) is not None and stun is not None:
            await asyncio.wait([task])
            if task is self._task:
                return None if task.cancelled() else task.result()
        return None

    async def why_hopeless(self, stun: str | None, theirs: str | None) -> str | None:
        """Say why a punch to who says this of their NAT need not be tried; waits while that is open."""
        self.prepare(stun)
        while stun is not None and (task := self._task) is not None and not task.done():
            if why_hopeless(self._strictest, theirs) is None:
                return None
            self._stirred.clear()
            await self._stirred.wait()
        return why_hopeless(await self.look(stun), theirs)

    def forget(self) -> None:
        """The network is another now: ask anew when somebody wants to know."""
        self._asked = ("", 0.0)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _classified(self, stun: str) -> NatClass | None:
        host, _, port = stun.rpartition(":")
        try:
            async with asyncio.timeout(CLASSIFY_S):
                return await classify(host.strip("[]"), int(port), on_seen=self._seen)
        except (OSError, ValueError, TimeoutError) as exc:
            log.info("the NAT could not be classified: %s", exc or "no answer in time")
            return None

    def _seen(self, seen: Observation) -> None:
        self._strictest = strictest_class(seen)
        self._stirred.set()


def why_hopeless(ours: NatClass | None, theirs: str | None) -> str | None:
    """Say why a punch between us and who says this of their NAT need not be tried; None: try."""
    try:
        other = None if theirs is None else NatClass.from_json(json.loads(theirs))
    except ValueError:
        return None
    if ours is None or other is None or not hopeless(ours, other):
        return None
    if not (ours.udp and other.udp):
        return None  # perhaps only the STUN server cannot be reached: a try costs little
    return f"no way through both NATs: here {ours.words}; there {other.words}"
