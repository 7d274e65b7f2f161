"""
Decide what a node does next: a pure state machine, mirrored line for line by `node-web/src/node.js`.

| state      | means                                                    | leaves it by                     |
|------------|----------------------------------------------------------|----------------------------------|
| CONNECTING | no session: a connection is being opened, or waited for  | Welcomed                         |
| GREETED    | the relay welcomed us, the kernel is still being tested  | KernelTested, KernelFault        |
| OFFERED    | our offer is out, no backbone needs us; slices are kept  | Assigned                         |
| ASSIGNED   | slices are being fetched; calls for the held ones served | last SliceLoaded                 |
| SERVING    | everything assigned is held                              | Assigned, Unpaired, Closed       |
| PAUSED     | the owner paused us: session and slices stay, no calls   | ResumeAsked                      |
| ASLEEP     | the device froze us: we said Bye and keep the slices     | Woke                             |
| DRAINING   | the owner leaves: accepted calls are finished            | last call answered, grace passed |
| CLOSED     | final; `closed_reason` says why                          | Start                            |

Events go in with the time, effects come out; a driver (`client.py`) carries them out. Nothing here touches a
socket, a clock, a file or the kernel. The scenarios in `tests/vectors/node_machine.json` bind both machines.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from backbone.node.events import (
    Assigned,
    AssignedLayer,
    Assignment,
    Call,
    CallComputed,
    CallFailed,
    CancelReceived,
    Closed,
    Compute,
    Connect,
    Disconnect,
    DispatchReceived,
    DrainReceived,
    Effect,
    Event,
    FreeSlice,
    KernelFault,
    KernelTested,
    LeaveAsked,
    NetworkChanged,
    PauseAsked,
    Reply,
    ResumeAsked,
    SendBye,
    SendFailure,
    SendOffer,
    SendPause,
    SendReady,
    SleepAsked,
    SliceFailed,
    SliceLoaded,
    SlicesLost,
    Start,
    TestKernel,
    Unpaired,
    Welcomed,
    Woke,
)
from backbone.node.holdings import Holdings, backoff_s

__all__ = ["NodeConfig", "NodeMachine", "State", "backoff_s", "reconnect_s"]

PARALLEL_FETCHES = 4
QUEUE_CALLS = 64
RECONNECT_CAP_S = 3.0  # a relay that is back has its nodes and backbones again before anybody gives up
ANNOUNCE_S = 2.0  # while slices come in, those that can be called are told so often
SETTLED_S = 5.0  # a session that lasted this long starts the next backoff from the beginning
LEAVE_GRACE_S = 1.2  # accepted calls get this long before Bye: one signal ends a node within 2 s
GOING_AWAY = 1001  # RFC 6455 §7.4.1

# Close codes after which reconnecting unchanged cannot help (PROTOCOL.md "Close codes").
FINAL_CLOSES: Mapping[int, str] = {
    1009: "this node sent a message larger than the relay takes",
    4400: "the relay could not read what this node sent; one of the two needs an update",
    4401: "the relay refused this identity",
    4409: "this device joined again elsewhere (another tab or process with the same identity)",
    4413: "this node sent a frame larger than the relay takes",
    4426: "the relay speaks another protocol version; update this node",
}
OVERLOADED = 4429  # come back slowly


class State(StrEnum):
    """The states of the table above."""

    CONNECTING = "CONNECTING"
    GREETED = "GREETED"
    OFFERED = "OFFERED"
    ASSIGNED = "ASSIGNED"
    SERVING = "SERVING"
    PAUSED = "PAUSED"
    ASLEEP = "ASLEEP"
    DRAINING = "DRAINING"
    CLOSED = "CLOSED"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What the owner allows."""

    memory_bytes: int
    threads: int = 1
    queue_calls: int = QUEUE_CALLS
    parallel_fetches: int = PARALLEL_FETCHES


@dataclass(slots=True)
class Counters:
    """What happened so far; only ever grows."""

    calls: int = 0
    rows: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    sessions: int = 0


@dataclass(slots=True)
class _Accepted:
    """A call between its acceptance and its answer."""

    call: Call
    expires_at: float | None
    cancelled: bool = False


def reconnect_s(code: int, attempt: int, jitter: float) -> float:
    """Wait before connecting again after a session, or a try, that ended with `code`."""
    return backoff_s(10, jitter) if code == OVERLOADED else backoff_s(attempt, jitter, RECONNECT_CAP_S)


class NodeMachine:
    """One node. `random()` gives numbers in [0, 1) for the jitter."""

    __slots__ = (
        "_announced_at", "_attempt", "_connect_at", "_leave_at", "_offered_bytes", "_queue", "_random",
        "_ready_sent", "_reconnect_after_s", "_running", "_tickets", "_welcomed_at", "asleep",
        "assignment", "closed_reason", "config", "connected", "counters", "draining", "holdings", "kernel",
        "paused",
    )  # fmt: skip

    def __init__(self, config: NodeConfig, random: Callable[[], float]) -> None:
        self.config = config
        self.counters = Counters()
        self.closed_reason: str | None = "not started"
        self.connected = False  # a session exists or is being opened
        self.kernel: KernelTested | None = None
        self.paused = False
        self.asleep = False
        self.draining = False
        self.assignment: Assignment | None = None
        self.holdings = Holdings(config.memory_bytes, config.parallel_fetches, random)
        self._random = random
        self._welcomed_at: float | None = None
        self._connect_at: float | None = None
        self._leave_at: float | None = None
        self._reconnect_after_s = 0.0
        self._attempt = 0
        self._offered_bytes: int | None = None  # in this session
        self._ready_sent: tuple[dict[int, tuple[int, ...]], ...] | None = None
        self._announced_at = 0.0
        self._queue: deque[_Accepted] = deque()
        self._running: dict[int, _Accepted] = {}  # by ticket: peers and call ids begin anew with each session
        self._tickets = 0

    # --- what others may ask

    @property
    def state(self) -> State:
        """The state of the table, derived from the facts so that it cannot contradict them."""
        if self.closed_reason is not None:
            return State.CLOSED
        if self.draining:
            return State.DRAINING
        if self.asleep:
            return State.ASLEEP
        if self._welcomed_at is None:
            return State.CONNECTING
        if self.kernel is None:
            return State.GREETED
        if self.paused:
            return State.PAUSED
        if self.assignment is None or not self.holdings.wanted:
            return State.OFFERED
        return State.SERVING if self.holdings.wanted.keys() <= self.held else State.ASSIGNED

    @property
    def held(self) -> set[str]:
        """The slices that are in the kernel."""
        return self.holdings.held

    @property
    def wanted(self) -> tuple[str, ...]:
        """The slices we shall hold, in the order of fetching."""
        return tuple(self.holdings.wanted)

    @property
    def running(self) -> int:
        """Calls in the kernel now."""
        return len(self._running)

    def layer(self, number: int) -> AssignedLayer:
        """An assigned layer; KeyError when it is none."""
        found = self.holdings.layer(number)
        if found is None:
            raise KeyError(number)
        return found

    def ready(self) -> dict[int, tuple[int, ...]]:
        """Layer -> experts that can be called now."""
        return self.holdings.ready()

    def next_timer(self) -> float | None:
        """When `handle_timer` wants to be called, if ever."""
        idle = self._welcomed_at is None or self.paused
        times = (self._connect_at, self._leave_at, None if idle else self.holdings.next_timer())
        return min((t for t in times if t is not None), default=None)

    def handle_timer(self, now: float) -> list[Effect]:
        """Do what is due."""
        effects: list[Effect] = []
        if self._leave_at is not None and now >= self._leave_at:
            return self._bye("grace for accepted calls is over")
        if self._connect_at is not None and now >= self._connect_at:
            self._connect_at = None
            effects.append(self._connect())
        return effects + self._fetch_more(now)

    def receive(self, event: Event, now: float) -> list[Effect]:
        """Take one event in, give the effects to carry out, in order."""
        match event:
            case Start():
                return self._start()
            case LeaveAsked():
                return self._leave(event.reason, now)
            case _ if self.closed_reason is not None:
                return [FreeSlice(event.slice)] if isinstance(event, SliceLoaded) else []
            case KernelTested():
                return self._kernel_tested(event)
            case KernelFault():
                return self._kernel_fault(event.reason)
            case Welcomed():
                return self._welcomed(now)
            case Assigned():
                return self._assigned(event.assignment, now)
            case SliceLoaded():
                return self._slice_loaded(event, now)
            case SliceFailed():
                return self._slice_failed(event, now)
            case SlicesLost():
                return self._slices_lost(event.slices, now)
            case DispatchReceived():
                return self._dispatch(event.call, now)
            case CancelReceived():
                return self._cancel((event.peer, event.call_id), now)
            case CallComputed():
                return self._computed(event.ticket, event.result, now)
            case CallFailed():
                return self._failed(event, now)
            case PauseAsked() | ResumeAsked():
                return self._pause(isinstance(event, PauseAsked), now)
            case SleepAsked():
                return self._sleep(event.reason)
            case Woke():
                return self._woke()
            case NetworkChanged():
                if self._connect_at is not None:
                    self._connect_at = min(self._connect_at, now + backoff_s(0, self._random()))
                return []
            case Unpaired():
                self._lose_pairing()
                return []
            case DrainReceived():
                self._reconnect_after_s = event.reconnect_after_s
                return []
            case Closed():
                return self._closed(event, now)

    # --- session

    def _start(self) -> list[Effect]:
        if self.closed_reason is None:
            return []
        self.closed_reason = None
        self.draining = self.asleep = self.paused = False
        self._attempt = 0
        self.kernel = None
        self.holdings.begin_anew()
        return [TestKernel(), self._connect()]

    def _connect(self) -> Connect:
        self.connected = True
        return Connect(resume=self.counters.sessions > 0)

    def _welcomed(self, now: float) -> list[Effect]:
        self._welcomed_at = now
        self.counters.sessions += 1
        self.holdings.session_began()
        return self._offer() if self.kernel is not None else []

    def _offer(self) -> list[Effect]:
        effects = self.offer()
        return effects + [SendPause(True)] if self.paused else effects

    def offer(self) -> list[Effect]:
        """Say what there is to offer, as soon as that is known."""
        if self._welcomed_at is None or self.kernel is None:
            return []
        self._offered_bytes = self.holdings.pledge_bytes
        return [SendOffer(tuple(sorted(self.held)), self._offered_bytes)]

    def _kernel_tested(self, tested: KernelTested) -> list[Effect]:
        former, self.kernel = self.kernel, tested
        if former is None:
            return self._offer() if self._welcomed_at is not None else []
        if former.build != tested.build:  # another kernel: what the relay was told is true no longer
            self.holdings.begin_anew()
            return self.offer()
        return [] if 0.5 < tested.gb_per_s / max(former.gb_per_s, 1e-9) < 2.0 else self.offer()

    def _kernel_fault(self, reason: str) -> list[Effect]:
        self.kernel = None
        return self._end(f"the kernel failed its known-answer test: {reason}", say=True)

    def _lose_session(self) -> None:
        """Forget what belonged to the session; slices and fetched bytes stay."""
        self.connected = False
        self._welcomed_at = self._offered_bytes = None
        self._lose_pairing()

    def _lose_pairing(self) -> None:
        """No backbone waits for our answers any more."""
        self.assignment = None
        self._ready_sent = None
        self._queue.clear()
        for accepted in self._running.values():
            accepted.cancelled = True

    def _closed(self, closed: Closed, now: float) -> list[Effect]:
        if not self.connected:
            return []
        settled = self._welcomed_at is not None and now - self._welcomed_at >= SETTLED_S
        self._lose_session()
        if self.draining:
            return self._end("left")
        if closed.code in FINAL_CLOSES:
            return self._end(FINAL_CLOSES[closed.code])
        if settled:
            self._attempt = 0
        jitter = self._random()
        wait_s = reconnect_s(closed.code, self._attempt, jitter)
        self._connect_at = now + max(wait_s, self._reconnect_after_s * (1.0 + jitter))
        self._reconnect_after_s = 0.0
        self._attempt += 1
        return []

    def _sleep(self, reason: str) -> list[Effect]:
        effects = self._goodbye(reason)
        self._lose_session()
        self._connect_at = None
        self.asleep = True
        return effects

    def _woke(self) -> list[Effect]:
        if self.draining:
            return []
        effects: list[Effect] = [Disconnect(GOING_AWAY, "woke up")] if self.connected else []
        self._lose_session()
        self.asleep = False
        self._connect_at = None
        self._attempt = 0
        self.kernel = None
        return effects + [TestKernel(), self._connect()]

    def _pause(self, paused: bool, now: float) -> list[Effect]:
        """Take no calls, and load nothing: whoever pauses may do so for the battery, or for the line."""
        if paused == self.paused:
            return []
        self.paused = paused
        said = self._welcomed_at is not None and self.kernel is not None
        effects: list[Effect] = [SendPause(paused)] if said else []
        if not paused:
            return effects + self._fetch_more(now)
        return effects + self.holdings.stop()

    def _leave(self, reason: str, now: float) -> list[Effect]:
        if self.closed_reason is not None:
            return []
        if self._welcomed_at is None or not (self._queue or self._running):
            return self._bye(reason)
        self.draining = True
        self._leave_at = now + LEAVE_GRACE_S
        return [] if self.paused else [SendPause(True)]  # no new calls, please

    def _goodbye(self, reason: str) -> list[Effect]:
        """Say Bye where somebody listens, and hang up."""
        effects: list[Effect] = []
        if self._welcomed_at is not None:
            effects.append(SendBye(GOING_AWAY, reason))
        if self.connected:
            effects.append(Disconnect(GOING_AWAY, reason))
        return effects

    def _bye(self, reason: str) -> list[Effect]:
        effects = self._goodbye(reason)
        return effects + self._end("left")

    def _end(self, reason: str, say: bool = False) -> list[Effect]:
        effects = self._goodbye(reason) if say else []
        self._lose_session()
        self._connect_at = self._leave_at = None
        self.draining = self.asleep = False
        effects += self.holdings.clear()
        self.closed_reason = reason
        return effects

    # --- slices

    def _assigned(self, assignment: Assignment, now: float) -> list[Effect]:
        self.assignment = assignment
        effects = self._drop_stale_calls(assignment)
        effects += self.holdings.assign(assignment.layers, assignment.model_tag)
        self._ready_sent = None
        return effects + self._pledge() + self._announce(now) + self._fetch_more(now)

    def _fetch_more(self, now: float) -> list[Effect]:
        return [] if self._welcomed_at is None or self.paused else self.holdings.fetch_more(now)

    def _pledge(self) -> list[Effect]:
        """Offer anew when it turned out that less fits than we said."""
        said, may = self._offered_bytes, self.holdings.pledge_bytes
        return [] if said is None or said == may else self.offer()

    def _slice_loaded(self, loaded: SliceLoaded, now: float) -> list[Effect]:
        holdings, slice_id = self.holdings, loaded.slice
        if slice_id not in holdings.fetching:
            return [] if slice_id in self.held else [FreeSlice(slice_id)]
        effects = holdings.loaded(slice_id, loaded.held_bytes) + self._pledge()
        pause = not holdings.fetching  # nothing more for a while: only repetitions are left
        if pause or holdings.complete(slice_id) or now - self._announced_at >= ANNOUNCE_S:
            effects += self._announce(now)
        return effects + self._fetch_more(now)

    def _slice_failed(self, failed: SliceFailed, now: float) -> list[Effect]:
        if failed.slice not in self.holdings.fetching:
            return []
        effects = self.holdings.failed(failed, now)
        return effects + self._pledge() + self._announce(now) + self._fetch_more(now)

    def _slices_lost(self, slices: tuple[str, ...], now: float) -> list[Effect]:
        self.holdings.lost(slices)
        return self._announce(now) + self._fetch_more(now)

    def _announce(self, now: float) -> list[Effect]:
        if self.assignment is None or self._welcomed_at is None:
            return []
        ready, refused = self.holdings.ready(), self.holdings.refused()
        if (ready, refused) == self._ready_sent:
            return []
        self._ready_sent, self._announced_at = (ready, refused), now
        return [SendReady(self.assignment.epoch, ready, refused, self.holdings.why() if refused else "")]

    # --- calls

    def _dispatch(self, call: Call, now: float) -> list[Effect]:
        alive = [a.call.key for a in self._running.values() if not a.cancelled] + [
            a.call.key for a in self._queue
        ]
        if call.key in alive:
            return []  # sent twice: the answer under way serves both
        refusal = self._refusal(call)
        if refusal is not None:
            return self._refuse(call, *refusal)
        expires_at = now + call.deadline_ms / 1000.0 if call.deadline_ms else None
        self._queue.append(_Accepted(call, expires_at))
        return self._compute_more(now)

    def _refusal(self, call: Call) -> tuple[str, str, int | None] | None:
        """Failure code, message, expert, or None when the call is ours to answer."""
        assignment = self.assignment
        if assignment is None:
            return "stale_epoch", "nothing is assigned to this node yet", None
        if call.epoch != assignment.epoch:
            return "stale_epoch", f"epoch {call.epoch} is not the current {assignment.epoch}", None
        if call.peer != assignment.peer:
            return "refused", "we are not paired with this peer", None
        if self.paused or self.draining:
            return "refused", "the owner paused this node" if self.paused else "this node is leaving", None
        layer = self.holdings.layer(call.layer)
        if call.model_tag != assignment.model_tag or layer is None:
            return "not_held", f"layer {call.layer} of model {call.model_tag:08x} is not assigned here", None
        if call.hidden_dim != layer.hidden_dim or call.grid not in layer.grids:
            return "bad_frame", f"hidden_dim or grid do not fit layer {call.layer}", None
        for expert in call.experts:
            slice_id = layer.experts.get(expert)
            if slice_id is None or slice_id not in self.held:
                return "not_held", f"expert {expert} of layer {call.layer} is not held", expert
        if len(self._queue) >= self.config.queue_calls:
            return "overloaded", f"{len(self._queue)} calls are waiting here", None
        return None

    def _refuse(self, call: Call, code: str, message: str, expert: int | None) -> list[Effect]:
        self.counters.failed += 1
        return [SendFailure(call.peer, call.call_id, call.epoch, code, message, "queue", call.layer, expert)]

    def _drop_stale_calls(self, assignment: Assignment) -> list[Effect]:
        """Refuse the waiting calls of a former epoch: their slices may be gone in a moment."""
        effects: list[Effect] = []
        kept: deque[_Accepted] = deque()
        for accepted in self._queue:
            if accepted.call.epoch == assignment.epoch:
                kept.append(accepted)
            else:
                effects += self._refuse(accepted.call, "stale_epoch", "the assignment changed", None)
        self._queue = kept
        return effects

    def _compute_more(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._queue and len(self._running) < self.config.threads:
            accepted = self._queue.popleft()
            if accepted.expires_at is not None and now > accepted.expires_at:
                self.counters.expired += 1  # PROTOCOL.md: any hop may drop an expired frame
                continue
            self._tickets += 1
            self._running[self._tickets] = accepted
            effects.append(Compute(self._tickets, accepted.call))
        if self.draining and not self._queue and not self._running:
            effects += self._bye("all accepted calls are answered")
        return effects

    def _cancel(self, key: tuple[int, int], now: float) -> list[Effect]:
        for accepted in self._queue:
            if accepted.call.key == key:
                self._queue.remove(accepted)
                self.counters.cancelled += 1
                return self._compute_more(now)
        for accepted in self._running.values():
            if accepted.call.key == key and not accepted.cancelled:
                accepted.cancelled = True
                self.counters.cancelled += 1
        return []

    def _computed(self, ticket: int, result: object, now: float) -> list[Effect]:
        accepted = self._running.pop(ticket, None)
        effects: list[Effect] = []
        if accepted is not None and not accepted.cancelled:
            self.counters.calls += 1
            self.counters.rows += accepted.call.num_tokens
            effects.append(Reply(accepted.call, result))
        return effects + self._compute_more(now)

    def _failed(self, event: CallFailed, now: float) -> list[Effect]:
        accepted = self._running.pop(event.ticket, None)
        effects: list[Effect] = []
        if accepted is not None and not accepted.cancelled:
            call = accepted.call
            self.counters.failed += 1
            effects.append(
                SendFailure(
                    call.peer,
                    call.call_id,
                    call.epoch,
                    event.code,
                    event.message,
                    "compute",
                    call.layer,
                    None,
                )
            )
        if event.code == "kernel_fault":
            effects.append(TestKernel())  # is it the call or the kernel? a failed test ends this node
        return effects + self._compute_more(now)
