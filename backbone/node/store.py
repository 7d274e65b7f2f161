"""
Get slices over HTTP and hold them, packed, in memory.

A slice is named by the SHA-256 of its bytes; nothing that does not hash to its name is ever packed.
"""

import hashlib
from dataclasses import dataclass

import httpx

from backbone.experts.native import NativeKernel, PackedExpert
from backbone.experts.webgpu import DeviceExpert, WebGpuKernel
from backbone.model.formula import Formula

FETCH_TIMEOUT_S = 30.0  # between two pieces of the body; the relay itself waits 10 s for the backbone


class SliceFault(Exception):
    """A slice could not be had; the message says what came instead."""


@dataclass(frozen=True, slots=True)
class HeldSlice:
    """One packed expert and what it weighed on the wire."""

    packed: PackedExpert | DeviceExpert
    size_bytes: int


async def fetch_slice(http: httpx.AsyncClient, slice_id: str, size_bytes: int) -> bytearray:
    """
    Download one slice of known size.

    Raises:
        SliceFault: any status but 200, or another length than promised, or a failing network.
    """
    body = bytearray()
    try:
        async with http.stream("GET", f"/slices/{slice_id}") as response:
            if response.status_code != 200:
                why = (await response.aread())[:200].decode("utf-8", "replace")
                raise SliceFault(f"slice {slice_id[:12]}: status {response.status_code} {why}")
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > size_bytes:
                    raise SliceFault(f"slice {slice_id[:12]}: longer than the {size_bytes} bytes promised")
    except httpx.HTTPError as exc:
        raise SliceFault(f"slice {slice_id[:12]}: {type(exc).__name__} {exc}") from exc
    if len(body) != size_bytes:
        raise SliceFault(f"slice {slice_id[:12]}: {len(body)} of {size_bytes} bytes came")
    return body


def verify_and_pack(
    kernel: NativeKernel | WebGpuKernel, formula: Formula, slice_id: str, data: bytes | bytearray
) -> HeldSlice:
    """
    Check the bytes against their name, then lay them out for the kernel. Blocks; run it in a thread.

    Raises:
        SliceFault: the bytes are not this slice, or the kernel refuses them.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != slice_id:
        raise SliceFault(f"slice {slice_id[:12]}: the bytes that came hash to {found[:12]}")
    try:
        return HeldSlice(kernel.pack(formula, data), len(data))
    except Exception as exc:
        raise SliceFault(f"slice {slice_id[:12]}: {exc}") from exc
