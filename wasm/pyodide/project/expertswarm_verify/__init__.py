"""
Recompute a recorded call of a swarm and compare bytes: the codec and the kernel, without numpy.

    record.py   the file a backbone writes with --record: request, answer, slices
    calls.py    Dispatch and Partial, as relay/wire/calls.py reads them
    wire/       frames, close codes, errors: relay/wire as it stands
    kernel.py   wasm/expert.h through ctypes
    check.py    record -> report

Runs in Pyodide and in any CPython; read check.py first.
"""

from expertswarm_verify.check import check
from expertswarm_verify.kernel import Kernel
from expertswarm_verify.record import BadRecord, Record

__all__ = ["BadRecord", "Kernel", "Record", "check"]
