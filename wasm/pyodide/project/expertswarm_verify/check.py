"""
Check a recorded call: is each slice what its name says, does recomputing give the bytes that were answered?

The report is plain data, so that a page can show it: see `Report`.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from expertswarm_verify.kernel import Kernel, KernelError
from expertswarm_verify.record import BadRecord, Record

MOST_DIFFERENCES = 20  # told one by one


@dataclass(slots=True)
class Report:
    """
    What was found. `agree`: the answer is, byte for byte, what the kernel computes, from slices that have
    the hashes they were recorded with.

    wrong_slices: experts whose bytes have another hash. differences: (row, column, answered, recomputed) in
    steps of the grid, the first ones. worst: the largest difference beside the largest output of its row; a
    graphics device may be off by up to 2^-8 (wasm/CONTRACT.md, "WebGPU"), no other node by anything.
    """

    agree: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    wrong_slices: list[int] = field(default_factory=list)
    differing: int = 0
    compared: int = 0
    differences: list[tuple[int, int, int, int]] = field(default_factory=list)
    worst: float = 0.0
    error: str = ""


def check(data: bytes, kernel: Kernel | None = None) -> dict[str, Any]:
    """Check the bytes of a record; gives a `Report` as a dict. Never raises for what a file may hold."""
    report = Report()
    try:
        _check(Record.read(data), kernel or Kernel(), report)
    except (BadRecord, KernelError, ValueError, KeyError, TypeError, OverflowError) as exc:
        report.error = str(exc) or repr(exc)
    return asdict(report)


def _check(record: Record, kernel: Kernel, report: Report) -> None:
    header, request, answer = record.header, record.request, record.answer
    report.facts = {
        "model": f"{header['model_name']} ({header['model'][:16]})",
        "layer": header["layer"],
        "rows": request.num_tokens,
        "experts": sorted(record.slices),
        "picks": len(request.experts),
        "slice_bytes": sum(map(len, record.slices.values())),
        "request_bytes": header["request_bytes"],
        "answer_bytes": header["answer_bytes"],
        "node": header["node"],
        "recorded_at": header["recorded_at"],
        "formula": header["formula"],
        "build": kernel.build,
        "answer_sha256": kernel.sha256(answer.widths + answer.data),
    }
    shape = (request.layer, request.num_tokens, request.hidden_dim, request.grid)
    if (answer.layer, len(answer.widths), answer.hidden_dim, answer.grid) != shape:
        raise BadRecord("the answer has another layer, shape or grid than the request")
    if header["layer"] != request.layer or header["formula"].get("hidden_dim") != request.hidden_dim:
        raise BadRecord("the request is about another layer than the header")
    names = {int(each["expert"]): each["sha256"] for each in header["slices"]}
    report.wrong_slices = [e for e, data in record.slices.items() if kernel.sha256(data) != names[e]]
    numbers = sorted(record.slices)
    missing = sorted(set(request.experts) - set(numbers))
    if missing:
        raise BadRecord(f"the slices of experts {missing} are not in the record")
    place = {number: index for index, number in enumerate(numbers)}
    sums = kernel.answer(
        header["formula"],
        [record.slices[number] for number in numbers],
        [place[expert] for expert in request.experts],
        request.weights,
        request.counts,
        request.x,
        request.x_encoding,
        request.row_exponents,
        request.grid,
        header["layer_exponents"],
    )
    widths, rows = kernel.encode_partial(sums, request.num_tokens, request.grid)
    report.facts["recomputed_sha256"] = kernel.sha256(widths + rows)
    report.compared = len(sums)
    if (widths, rows) == (answer.widths, answer.data):
        report.agree = not report.wrong_slices
        return
    answered = kernel.decode_partial(answer.widths, answer.data, request.hidden_dim, request.grid)
    _compare(answered, sums, request.hidden_dim, report)


def _compare(answered: list[int], computed: list[int], dim: int, report: Report) -> None:
    for at in range(0, len(computed), dim):
        scale = max(1, *map(abs, computed[at : at + dim]))
        for column in range(dim):
            ours, theirs = computed[at + column], answered[at + column]
            if ours != theirs:
                report.differing += 1
                report.worst = max(report.worst, abs(ours - theirs) / scale)
                if len(report.differences) < MOST_DIFFERENCES:
                    report.differences.append((at // dim, column, theirs, ours))
