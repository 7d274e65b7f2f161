"""
The webrtc lane: a data channel between backbone and node, through NATs.

libdatachannel by aiolibdatachannel, on its callbacks: its asyncio face has a receive queue that drops the
oldest of 1024 messages without a word, and here a message is handled in the loop turn that brings it. SCTP's
defaults are made for little: with them 100 KB take 572 ms on a path of 80 ms, with SCTP_SETTINGS 91 ms; any
one of them alone does not help. Without the package the lane is not offered.
"""

import asyncio
import ctypes
import functools
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from types import ModuleType
from typing import Any

from backbone.lanes.chooser import Attempt
from backbone.lanes.ice import Candidates
from backbone.lanes.link import Link
from backbone.lanes.nat import NatWatch
from relay.wire.errors import RemoteProtocolError
from relay.wire.messages import PeerNode, Signal
from relay.wire.pieces import Assembler, SendQueue
from relay.wire.stream import Reassembler, packets

log = logging.getLogger(__name__)

WEBRTC = "webrtc"
LABEL = "link"
PIECE_BYTES = 16 << 10  # every end takes 256 KiB; little enough that beats pass between
# The other end's UDP socket holds some 90 packets (Linux' default). 100 KB at once overflow it, and the
# tail, lost with nothing behind it, is sent again half a second later.
BURST_BYTES, BURST_PAUSE_S = 48 << 10, 0.001
MAX_BUFFERED_BYTES = 1 << 20  # given to SCTP at once; Chrome closes a channel that is over-filled
LOW_BYTES = 256 << 10
MAX_WAITING_BYTES = 32 << 20  # two of the largest frames; beyond this nobody reads
SCTP_SETTINGS = {
    "recvBufferSize": 4 << 20,
    "sendBufferSize": 4 << 20,
    "initialCongestionWindow": 100,
    "maxBurst": 100,
    "delayedSackTimeMs": 1,
    # Chromium acknowledges a lone packet after 200 ms. Sent again before that (the default is 200 ms), a ping
    # between calls shuts the window to one packet, and 12 KB take two round trips from then on, 100 KB eight.
    "minRetransmitTimeoutMs": 400,
}
_SCTP_FIELDS = (
    "recvBufferSize sendBufferSize maxChunksOnQueue initialCongestionWindow maxBurst "
    "congestionControlModule delayedSackTimeMs minRetransmitTimeoutMs maxRetransmitTimeoutMs "
    "initialRetransmitTimeoutMs maxRetransmitAttempts heartbeatIntervalMs"
).split()  # rtcSctpSettings of libdatachannel's rtc.h, in order; 0 keeps a default
_OVER = (4, 5)  # rtcState: failed, closed. Disconnected may recover; the link's beats decide

type SaySignal = Callable[[str, Mapping[str, str]], None]


class _SctpSettings(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in _SCTP_FIELDS]


@functools.cache
def native() -> ModuleType | None:
    """Give the binding with SCTP tuned, or None where it is not installed or cannot be tuned."""
    try:
        from aiolibdatachannel import _core, _native  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    settings = _SctpSettings(**SCTP_SETTINGS)
    try:
        done = ctypes.CDLL(_native.__file__).rtcSetSctpSettings(ctypes.byref(settings))
    except (OSError, AttributeError) as exc:
        log.warning("the webrtc lane is off: SCTP cannot be tuned: %s", exc)
        return None
    if done != 0:
        log.warning("the webrtc lane is off: SCTP took none of its settings (%d)", done)
        return None
    return _core


class RtcEnd:
    """One end of a data channel that carries a link; the link's transport. `close` ends it all."""

    def __init__(self, link: Link, say: SaySignal, stun: str | None) -> None:
        core = native()
        assert core is not None  # whoever offers the lane has looked
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._say = say
        self._stream = Reassembler()
        self._assembler = Assembler()
        self._queue = SendQueue()
        self._packets: deque[bytes] = deque()  # of the message that is leaving
        self._received_bytes = self._sent_bytes = 0
        self._channel: Any = None
        self._pause: asyncio.TimerHandle | None = None  # between two bursts
        self._open = False
        self._over = False
        self._remote_set = False
        self._candidates = Candidates()  # of the other end
        self._early: list[tuple[str, str]] = []
        self._pc = core.PeerConnection(ice_servers=[f"stun:{stun}"] if stun else [])
        self._pc.set_on_local_description(self._here(self._described))
        self._pc.set_on_local_candidate(self._here(self._found))
        self._pc.set_on_state_change(self._here(self._state))
        self._pc.set_on_data_channel(self._incoming)
        link.transport = self

    # -- for the owner

    def offer(self, extra: Mapping[str, str]) -> None:
        """Make the channel and say `offer`."""
        self._extra = extra
        self._adopt(self._core.DataChannel(self._pc.create_data_channel(LABEL)))
        self._later(self._pc.set_local_description, "offer")

    async def accept(self, sdp: str) -> None:
        """Take an offer and say `answer`."""
        self._extra = {}
        await self._remote(sdp, "offer")
        if not self._over:
            self._later(self._pc.set_local_description, "answer")

    async def answered(self, sdp: str) -> None:
        """Take the answer to our offer."""
        await self._remote(sdp, "answer")

    def candidate(self, candidate: str, mid: str) -> None:
        """Take a candidate of the other end."""
        if self._over or not self._candidates.take(candidate):
            return
        if self._remote_set:
            self._later(self._pc.add_remote_candidate, candidate, mid)
        else:
            self._early.append((candidate, mid))

    # -- Transport

    @property
    def unsent_bytes(self) -> int:
        if self._channel is None or self._over:
            return 0
        return self._queue.size_bytes + sum(map(len, self._packets)) + int(self._channel.buffered_amount())

    @property
    def moved_bytes(self) -> int:
        if self._channel is None or self._over:
            return self._received_bytes
        return self._received_bytes + self._sent_bytes - int(self._channel.buffered_amount())

    def send(self, data: bytes) -> None:
        if self._over or not self._open:
            return
        self._queue.put(data)
        self._drain()
        if self._queue.size_bytes > MAX_WAITING_BYTES:
            self._ended("the other end does not read")

    def close(self, code: int, reason: str) -> None:
        """End the channel; what was sent just now still leaves."""
        if self._over:
            return
        self._over = True
        channel, pc = self._channel, self._pc

        def destroy() -> None:
            if channel is not None:
                channel.destroy()
            pc.destroy()

        self._loop.call_later(0.2, lambda: self._loop.run_in_executor(None, destroy))

    # -- inside, on the loop

    def _here(self, handle: Callable[..., None]) -> Callable[..., None]:
        """Turn a handler into a callback for the library's threads."""

        def callback(*values: object) -> None:
            try:
                self._loop.call_soon_threadsafe(handle, *values)
            except RuntimeError:
                pass  # the loop is closed: nobody wants to know any more

        return callback

    def _later(self, work: Callable[..., None], *values: str) -> None:
        """Call the library where it may block."""

        async def run() -> None:
            try:
                await self._loop.run_in_executor(None, work, *values)
            except Exception as exc:  # the library raises its own RuntimeErrors for anything it cannot read
                self._ended(f"{type(exc).__name__}: {exc}")

        task = self._loop.create_task(run())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)

    async def _remote(self, sdp: str, kind: str) -> None:
        try:
            await self._loop.run_in_executor(
                None, self._pc.set_remote_description, self._candidates.of(sdp), kind
            )
        except Exception as exc:
            self._ended(f"the {kind} cannot be read: {exc}")
            return
        self._remote_set = True
        for candidate, mid in self._early:
            self._later(self._pc.add_remote_candidate, candidate, mid)
        self._early.clear()

    def _described(self, sdp: str, kind: str) -> None:
        if not self._over:
            self._say(kind, {**self._extra, "sdp": sdp})

    def _found(self, candidate: str, mid: str) -> None:
        if not self._over:
            self._say("candidate", {"candidate": candidate, "mid": mid})

    def _state(self, state: int) -> None:
        if state in _OVER:
            self._ended("no way through" if not self._open else "the data channel is gone")

    def _incoming(self, handle: int) -> None:
        """On a thread of the library: the callbacks must be there before the first message."""
        self._adopt(self._core.DataChannel(handle))

    def _adopt(self, channel: Any) -> None:
        self._channel = channel
        channel.set_buffered_amount_low_threshold(LOW_BYTES)
        channel.set_on_message(self._here(self._received))
        channel.set_on_closed(self._here(lambda: self._ended("the data channel was closed")))
        channel.set_on_buffered_amount_low(self._here(self._drain))
        channel.set_on_open(self._here(self._opened))
        if channel.is_open():
            self._here(self._opened)()

    def _opened(self) -> None:
        if not self._open and not self._over:
            self._open = True
            self._link.opened()

    def _received(self, data: bytes | str) -> None:
        if self._over:
            return
        self._opened()  # its callback may come after the first message
        if isinstance(data, str):
            self._link.received(data)
            return
        self._received_bytes += len(data)
        now = monotonic()
        try:
            for message in self._stream.feed(data):
                if (frame := self._assembler.feed(message, now)) is not None:
                    self._link.received(frame)
        except RemoteProtocolError as exc:
            self._ended(str(exc))

    def _drain(self) -> None:
        burst_bytes = 0
        while (self._packets or len(self._queue)) and self._pause is None and not self._over:
            if self._channel.buffered_amount() >= MAX_BUFFERED_BYTES:
                return  # the channel says when it is low
            if burst_bytes >= BURST_BYTES:
                self._pause = self._loop.call_later(BURST_PAUSE_S, self._burst)
                return
            if not self._packets:
                self._packets.extend(packets(self._queue.pop() or b"", PIECE_BYTES))
            packet = self._packets.popleft()
            burst_bytes += len(packet)
            self._sent_bytes += len(packet)
            try:
                self._channel.send_bytes(packet)
            except Exception as exc:
                self._ended(f"the data channel takes nothing: {exc}")

    def _burst(self) -> None:
        self._pause = None
        self._drain()

    def _ended(self, why: str) -> None:
        if not self._over:
            self.close(1001, why)
            self._link.ended(1001, why)


_tasks: set["asyncio.Task[None]"] = set()


class WebRtcOpener:
    """Opens data channels to nodes; `stun` gives the STUN server's `host:port`, if there is one."""

    def __init__(self, stun: Callable[[], str | None]) -> None:
        self._stun = stun
        self._nat = NatWatch()

    def prepare(self) -> None:
        """The relay is known now: find out what NAT we are behind."""
        if native() is not None:
            self._nat.prepare(self._stun())

    def network_changed(self) -> None:
        """Whatever NAT we were behind, we may be behind another."""
        self._nat.forget()
        self.prepare()

    def close(self) -> None:
        self._nat.close()

    def offers(self, node: PeerNode) -> bool:
        return WEBRTC in node.lanes and native() is not None

    async def open(self, attempt: Attempt) -> None:
        stun, over = self._stun(), asyncio.Event()
        attempt.close = over.set
        nat = await self._nat.look(stun)
        if over.is_set():
            return
        end = RtcEnd(attempt.make_link(), attempt.signal, stun)

        def signalled(signal: Signal) -> None:
            data = signal.data
            if signal.kind == "answer":
                task = asyncio.create_task(end.answered(data.get("sdp", "")))
                _tasks.add(task)
                task.add_done_callback(_tasks.discard)
            elif signal.kind == "candidate":
                end.candidate(data.get("candidate", ""), data.get("mid", ""))

        attempt.signalled = signalled
        attempt.close = lambda: end.close(1001, "the attempt is over")
        extra = {"key": attempt.known.key.hex()}
        if nat is not None:
            extra["nat"] = json.dumps(nat.to_json())
        end.offer(extra | {"stun": stun} if stun else extra)
