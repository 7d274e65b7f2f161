"""
Upload slices that the relay asks for: each once, however often it asks, and two at a time.

Slices are bulk on connections of their own; two keep a link busy without starving calls. What the relay has
by the time its turn comes is not sent. An upload that breaks off is tried again a few times, then left: the
relay asks again while somebody waits.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from time import monotonic

import httpx

from backbone.node.machine import backoff_s
from relay.program.complaints import Complaints

log = logging.getLogger(__name__)

UPLOAD_TIMEOUT_S = 120.0
UPLOADS_AT_ONCE = 2
TRIES = 3
MOST_WAITING = 100_000  # slices of the largest models are fewer
STALE_S = 2.0  # whatever waited longer may have come from elsewhere


class Uploads:
    """The slices that wait, in the order they were asked for. slice_bytes: as in LaneHandlers."""

    def __init__(self, relay_url: str, slice_bytes: Callable[[str], bytes | None]) -> None:
        self._http = httpx.AsyncClient(base_url=relay_url, timeout=UPLOAD_TIMEOUT_S, trust_env=False)
        self._slice_bytes = slice_bytes
        self._token = ""
        self._complaints = Complaints(log)
        self._waiting: dict[str, float] = {}  # slice -> when it was asked for
        self._running: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def begin(self, token: str) -> None:
        """A session with the relay began: what the former one asked for is forgotten, it asks again."""
        self._token = token
        self._waiting.clear()

    def wanted(self, slice_id: str) -> None:
        """The relay asks for a slice."""
        if slice_id in self._waiting or slice_id in self._running or len(self._waiting) >= MOST_WAITING:
            return
        self._waiting[slice_id] = monotonic()
        self._start()

    async def close(self) -> None:
        """Stop in the middle."""
        self._waiting.clear()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    def _start(self) -> None:
        while self._waiting and len(self._running) < UPLOADS_AT_ONCE:
            slice_id = next(iter(self._waiting))
            asked_at = self._waiting.pop(slice_id)
            task = asyncio.create_task(self._upload(slice_id, monotonic() - asked_at > STALE_S))
            self._running[slice_id] = task
            task.add_done_callback(partial(self._ended, slice_id))

    def _ended(self, slice_id: str, task: "asyncio.Task[None]") -> None:
        del self._running[slice_id]
        if not task.cancelled() and task.exception() is not None:
            log.error("slice %s was not uploaded", slice_id[:12], exc_info=task.exception())
        if not task.cancelled():
            self._start()

    async def _upload(self, slice_id: str, look_first: bool) -> None:
        data: bytes | None = None
        for attempt in range(TRIES):
            try:
                if look_first and (await self._http.head(f"/slices/{slice_id}")).status_code == 200:
                    return
                if data is None:
                    data = await asyncio.to_thread(self._slice_bytes, slice_id)
                if data is None:
                    log.warning("the relay wants slice %s, which this model does not have", slice_id[:12])
                    return
                answer = await self._put(slice_id, data)
                if answer.status_code >= 400:
                    said = f"the relay refused slice {slice_id[:12]}: {answer.text[:200]}"
                    self._complaints.say(f"refused {answer.status_code}", said, logging.WARNING)
                return
            except httpx.HTTPError as exc:
                log.warning("slice %s did not reach the relay: %s", slice_id[:12], exc or type(exc).__name__)
            await asyncio.sleep(backoff_s(attempt, random.random()))
            look_first = True

    async def _put(self, slice_id: str, data: bytes) -> httpx.Response:
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/octet-stream"}
        return await self._http.put(f"/slices/{slice_id}", content=data, headers=headers)
