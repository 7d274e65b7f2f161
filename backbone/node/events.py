"""
What a node's state machine is told (events) and what it asks for in return (effects).

`machine.py` gives them their meaning. In JavaScript they are plain objects with a `type` and the same fields
in camelCase; `tests/vectors/node_machine.json` writes them as JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# --- what the machine is told about


@dataclass(frozen=True, slots=True)
class AssignedLayer:
    """
    What we shall hold of one layer: expert index -> slice id.

    `grids` are those the layer is calibrated for (PROTOCOL.md "Grids"); `body` is the driver's.
    `refusal`: why this kernel cannot compute the layer, if it cannot. `held_bytes`: what a slice takes in
    memory, if that is known before (0: it is not).
    """

    layer: int
    experts: Mapping[int, str]
    slice_bytes: int
    hidden_dim: int
    grids: tuple[int, ...]
    refusal: str = ""
    held_bytes: int = 0
    body: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The complete set the relay wants us to hold, and the peer we answer to."""

    epoch: int
    peer: int
    model_tag: int
    layers: tuple[AssignedLayer, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One dispatch, as far as deciding about it needs; `body` is the driver's."""

    peer: int
    call_id: int
    epoch: int
    deadline_ms: int
    model_tag: int
    layer: int
    hidden_dim: int
    grid: int
    num_tokens: int
    experts: tuple[int, ...]
    body: object = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> tuple[int, int]:
        """What identifies a call while it lives."""
        return (self.peer, self.call_id)


# --- events


@dataclass(frozen=True, slots=True)
class Start:
    """Begin, or begin again after CLOSED."""


@dataclass(frozen=True, slots=True)
class KernelTested:
    """The known-answer test passed."""

    build: str
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class KernelFault:
    """The known-answer test failed: this device must not serve."""

    reason: str


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The relay accepted our Hello."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """An Assign frame came."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class SliceLoaded:
    """A slice was fetched (or read back), verified and packed; it takes so much memory (0: as its bytes)."""

    slice: str
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SliceFailed:
    """
    A slice could not be had this time.

    kind: of `holdings.py`'s table. progress: more of its bytes are here than before, and kept.
    """

    slice: str
    reason: str
    kind: str = "network"
    progress: bool = False


@dataclass(frozen=True, slots=True)
class SlicesLost:
    """The kernel no longer holds these: a device was lost, a worker died, another build took over."""

    slices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DispatchReceived:
    """A Dispatch frame came."""

    call: Call


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """The backbone no longer wants this call."""

    peer: int
    call_id: int


@dataclass(frozen=True, slots=True)
class CallComputed:
    """The kernel finished a call; `result` is the driver's."""

    ticket: int
    result: object


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The kernel refused a call, by one of the Failure codes."""

    ticket: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class PauseAsked:
    """The owner pressed pause."""


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """The owner pressed resume."""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """The owner leaves for good."""

    reason: str


@dataclass(frozen=True, slots=True)
class SleepAsked:
    """The device is about to freeze or hide us: there is time for one sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Woke:
    """The device lets us run again, or time jumped: whatever session we had is not to be trusted."""


@dataclass(frozen=True, slots=True)
class NetworkChanged:
    """The device has another network: what failed on the old one is worth a try now."""


@dataclass(frozen=True, slots=True)
class Unpaired:
    """The backbone left and there is no other: no calls come until the next Assigned."""


@dataclass(frozen=True, slots=True)
class DrainReceived:
    """The relay is going away and says when to come back."""

    reconnect_after_s: float


@dataclass(frozen=True, slots=True)
class Closed:
    """The session ended, or could not be opened (code 0)."""

    code: int
    reason: str


type Event = (
    Start | KernelTested | KernelFault | Welcomed | Assigned | SliceLoaded | SliceFailed | SlicesLost
    | DispatchReceived | CancelReceived | CallComputed | CallFailed | PauseAsked | ResumeAsked | LeaveAsked
    | SleepAsked | Woke | NetworkChanged | Unpaired | DrainReceived | Closed
)  # fmt: skip


# --- effects


@dataclass(frozen=True, slots=True)
class TestKernel:
    """Run the known-answer test; answer with KernelTested or KernelFault."""

    __test__ = False  # not a pytest class


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a session; `resume` says that one existed before."""

    resume: bool


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the session; no Closed event is expected for it."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Say what we pledge; the driver adds the slices it keeps on disk to the inventory."""

    inventory: tuple[str, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class SendReady:
    """Say which experts can be called now, which assigned ones will not be loaded, and why."""

    epoch: int
    experts: Mapping[int, tuple[int, ...]]
    refused: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, slots=True)
class SendPause:
    """Say whether calls are welcome."""

    paused: bool


@dataclass(frozen=True, slots=True)
class SendBye:
    """Say the last word of a session."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class FetchSlice:
    """Get, verify and pack a slice; answer with SliceLoaded or SliceFailed."""

    slice: str
    layer: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StopFetch:
    """A fetch is no longer wanted; its answer will be ignored."""

    slice: str


@dataclass(frozen=True, slots=True)
class FreeSlice:
    """Give a slice's memory back."""

    slice: str


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a call in the kernel; answer with CallComputed or CallFailed and the same ticket."""

    ticket: int
    call: Call


@dataclass(frozen=True, slots=True)
class Reply:
    """Send what the kernel computed."""

    call: Call
    result: object


@dataclass(frozen=True, slots=True)
class SendFailure:
    """Say that a call will not be answered, and why."""

    peer: int
    call_id: int
    epoch: int
    code: str
    message: str
    phase: str
    layer: int
    expert: int | None


type Effect = (
    TestKernel | Connect | Disconnect | SendOffer | SendReady | SendPause | SendBye | FetchSlice
    | StopFetch | FreeSlice | Compute | Reply | SendFailure
)  # fmt: skip
