"""
Get slices over HTTP and hold them, packed, in memory.

A slice is named by the SHA-256 of its bytes; nothing that does not hash to its name is ever packed.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from backbone.experts.native import BadCall, KernelFault, NativeKernel, NonFinite, NotSupported, PackedExpert
from backbone.experts.webgpu import DeviceExpert, DeviceLost, WebGpuKernel
from backbone.model.formula import Formula
from backbone.node.room import memory_left

FETCH_TIMEOUT_S = 30.0  # between two pieces of the body; the relay itself waits 10 s for the backbone
REFUSAL_BYTES = 200  # of an error body are read


class SliceFault(Exception):
    """A slice could not be had; `kind` as in the table of `holdings.py`, the message says what came."""

    def __init__(self, slice_id: str, what: str, kind: str = "network") -> None:
        self.kind = kind
        super().__init__(f"slice {slice_id[:12]}: {what}")


@dataclass(frozen=True, slots=True)
class HeldSlice:
    """One packed expert and what it weighed on the wire."""

    packed: PackedExpert | DeviceExpert
    size_bytes: int


async def download(
    http: httpx.AsyncClient, slice_id: str, size_bytes: int, body: bytearray, count: Callable[[int], None]
) -> None:
    """
    Add to `body` what is missing of a slice of known size: only the rest is asked for. count: told of all
    bytes that come.

    Raises:
        SliceFault: the network failed, or what came is no such slice; `body` keeps what is worth keeping.
    """
    start = len(body)
    headers = {"accept-encoding": "identity"}
    if start:
        headers |= {"range": f"bytes={start}-", "if-range": f'"{slice_id}"'}
    try:
        async with http.stream("GET", f"/slices/{slice_id}", headers=headers) as response:
            if response.status_code == 200:
                body.clear()  # from the beginning, whatever we asked for
            elif response.status_code != 206 or not _continues(response, start, size_bytes):
                if response.status_code in (206, 416):
                    body.clear()
                raise SliceFault(slice_id, f"status {response.status_code} {await _begin_of(response)}")
            async for piece in response.aiter_raw():
                count(len(piece))
                body += piece
                if len(body) > size_bytes:
                    body.clear()
                    raise SliceFault(slice_id, f"longer than the {size_bytes} bytes promised")
    except MemoryError as exc:
        raise SliceFault(slice_id, "no memory for its bytes", "memory") from exc
    except httpx.HTTPError as exc:
        raise SliceFault(slice_id, f"{type(exc).__name__} {exc}".strip()) from exc
    if len(body) != size_bytes:
        raise SliceFault(slice_id, f"{len(body)} of {size_bytes} bytes came")


def _continues(response: httpx.Response, start: int, size_bytes: int) -> bool:
    said: str | None = response.headers.get("content-range")
    return said == f"bytes {start}-{size_bytes - 1}/{size_bytes}"


async def _begin_of(response: httpx.Response) -> str:
    """Read why it was refused, but not more: a body may be of any length."""
    async for piece in response.aiter_raw():
        return piece[:REFUSAL_BYTES].decode("utf-8", "replace")
    return ""


def reserve(
    kernel: NativeKernel | WebGpuKernel, formula: Formula, slice_id: str, size_bytes: int
) -> PackedExpert | None:
    """
    Take the memory a slice will need, before a byte of it is fetched. Blocks: the kernel may test itself.

    Raises:
        SliceFault: there is no room, or the kernel cannot compute the formula.
    """
    try:
        left = memory_left()
        packed_bytes = size_bytes if isinstance(kernel, WebGpuKernel) else kernel.packed_bytes(formula)
        if left is not None and left < packed_bytes + size_bytes:
            raise SliceFault(slice_id, f"no memory for {packed_bytes} bytes more ({left} left)", "memory")
        return None if isinstance(kernel, WebGpuKernel) else kernel.reserve(formula)
    except Exception as exc:
        raise _fault(slice_id, exc) from exc


def matches(slice_id: str, data: bytes | bytearray) -> bool:
    """Whether these bytes are what the name says."""
    return hashlib.sha256(data).hexdigest() == slice_id


def pack(
    kernel: NativeKernel | WebGpuKernel,
    formula: Formula,
    slice_id: str,
    data: bytes | bytearray,
    into: PackedExpert | None,
) -> HeldSlice:
    """
    Lay verified bytes out for the kernel. Blocks; run it in a thread.

    Raises:
        SliceFault: the kernel refuses them.
    """
    try:
        if isinstance(kernel, WebGpuKernel):
            return HeldSlice(kernel.pack(formula, data), len(data))
        return HeldSlice(kernel.pack(formula, data, into=into), len(data))
    except Exception as exc:
        raise _fault(slice_id, exc) from exc


def _fault(slice_id: str, exc: Exception) -> SliceFault:
    """Say what a failure of the kernel means for the slice."""
    match exc:
        case SliceFault():
            return exc
        case MemoryError():
            return SliceFault(slice_id, str(exc) or "no memory", "memory")
        case NonFinite() | BadCall():
            return SliceFault(slice_id, str(exc), "slice")
        case DeviceLost():
            return SliceFault(slice_id, str(exc), "kernel")
        case NotSupported() | KernelFault():
            return SliceFault(slice_id, str(exc), "formula")
        case _:
            return SliceFault(slice_id, f"{type(exc).__name__}: {exc}", "kernel")
