"""
What the wheel of wasm/pyodide must compute, run by whoever has its package: CPython here, Pyodide in Node.js.

Reads the vectors in /data (or DATA, where a caller has set it); leaves what it found in `result`. Assertions
are what fails. Needs nothing but the standard library and expertswarm_verify.
"""

import json
import struct
from pathlib import Path

from expertswarm_verify.calls import Dispatch, Partial
from expertswarm_verify.check import check
from expertswarm_verify.kernel import Kernel, KernelError
from expertswarm_verify.wire.errors import RemoteProtocolError
from expertswarm_verify.wire.frames import Frame

data = Path(globals().get("DATA", "/data"))
kernel = globals().get("KERNEL") or Kernel()


def vectors(name: str) -> dict:
    return json.loads((data / f"{name}.json").read_text())


def floats(text: str) -> list[float]:
    raw = bytes.fromhex(text)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def integers(values: list[str]) -> list[int]:
    return [int(value) for value in values]


# --- the kernel's own known answers: its digests are those of wasm/hashes.txt

digests = [kernel.known_answer(i, rows) for i in range(kernel.num_known_answers) for rows in (1, 2, 7)]

# --- whole dispatches, computed once by the NumPy reference

dispatches = vectors("kernel")["dispatches"]
for each in dispatches:
    exponents = {0: [each["x32"]], 1: each["x16"]}
    slices = [bytes.fromhex(text) for text in each["slices"]]
    x, rows = floats(each["x"]), len(each["counts"])
    assert kernel.row_exponents(x, rows) == each["row_exponents"]
    encoded = kernel.encode_x(x, rows, each["encoding"])
    assert encoded.hex() == each["encoded_x"]
    for grid, encoding, rows_of_x in ((0, 0, bytes.fromhex(each["x"])), (1, each["encoding"], encoded)):
        sums = kernel.answer(
            each["formula"],
            slices,
            each["picks"],
            floats(each["weights"]),
            each["counts"],
            rows_of_x,
            encoding,
            each["row_exponents"],
            grid,
            exponents[grid],
        )
        assert sums == integers(each["sums_x16" if grid else "sums_x32"]), each["formula"]

# --- tensors on the wire

tensors = vectors("tensors")
for each in tensors["x"]:
    x, rows = floats(each["x_f32"]), each["num_tokens"]
    assert kernel.encode_x(x, rows, each["encoding"]).hex() == each["encoded"]
    assert kernel.row_exponents(x, rows) == each["row_exponents"]
for each in tensors["partials"]:
    sums, widths = integers(each["sums"]), bytes.fromhex(each["widths"])
    assert kernel.encode_partial(sums, len(widths), each["grid"]) == (widths, bytes.fromhex(each["data"]))
    found = kernel.decode_partial(widths, bytes.fromhex(each["data"]), each["hidden_dim"], each["grid"])
    assert found == sums

# --- frames, and what they carry of calls

frames = vectors("frames")
calls = 0
for each in frames["valid"]:
    frame = Frame.decode(bytes.fromhex(each["hex"]))
    assert frame.encode().hex() == each["hex"], each["name"]
    fields = each["fields"]
    if each["message"] == "Dispatch":
        read = Dispatch.from_payload(frame.payload)
        assert (read.model_tag, read.layer, read.hidden_dim) == tuple(
            fields[key] for key in ("model_tag", "layer", "hidden_dim")
        )
        assert (read.x_encoding, read.grid, read.x.hex()) == (
            fields["x_encoding"],
            fields["grid"],
            fields["x"],
        )
        for key in ("row_exponents", "counts", "experts", "weights"):
            assert list(getattr(read, key)) == fields[key], key
        calls += 1
    elif each["message"] == "Partial":
        answer = Partial.from_payload(frame.payload)
        assert answer.to_payload() == frame.payload
        found = kernel.decode_partial(answer.widths, answer.data, answer.hidden_dim, answer.grid)
        assert found == [int(value) for row in fields["sums"] for value in row]
        calls += 1
assert calls >= 4
refused = 0
for each in frames["refused"]:
    try:
        frame = Frame.decode(bytes.fromhex(each["hex"]))
        {16: Dispatch, 17: Partial}[int(frame.type)].from_payload(frame.payload)
    except RemoteProtocolError as exc:
        assert int(exc.close_code) == each["close_code"], each["name"]
        refused += 1
    except KeyError:
        pass  # a message that is no call: not this package's to read

# --- what a kernel must refuse

try:
    kernel.answer(dispatches[0]["formula"], [b"short"], [0], [1.0], [1], b"", 0, [0], 0, [6])
    raise AssertionError("a slice of five bytes was packed")
except KernelError as exc:
    assert exc.code == -3

# --- recorded calls

reports = {path.name: check(path.read_bytes(), kernel) for path in sorted(data.glob("*.escall"))}

result = {"build": kernel.build, "digests": digests, "refused": refused, "reports": reports}
