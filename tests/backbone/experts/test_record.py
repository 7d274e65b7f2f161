"""Recorded calls: the first answer of each node, whole, and no more than was promised."""

import hashlib
import json
from pathlib import Path

import pytest

from backbone.experts.native import NativeKernel
from backbone.experts.nodes import Node
from backbone.experts.plans import LayerPlan
from backbone.experts.record import MAGIC, MOST_RECORDS, Recorder
from relay.wire.calls import Dispatch, Partial
from relay.wire.frames import Frame
from relay.wire.tensors import Grid, XEncoding
from tests.fakes.model import X32, RandomModel

MODEL = RandomModel.make(layers=2, experts=4)
PLAN = LayerPlan(1, MODEL.formula, XEncoding.Q8A32, X32)


def node(name: str = "n1") -> Node:
    return Node(name, 3, 5, f"node {name}", "native-avx2", 1.0, "relay", {1: frozenset({0, 1, 2, 3})})


def recorder(folder: Path, most_bytes: int = 1 << 20) -> Recorder:
    return Recorder(
        folder, "ab" * 32, "random", lambda layer, expert: MODEL.slices[layer][expert], most_bytes
    )


def call(picks: list[list[int]]) -> tuple[Dispatch, Partial]:
    dispatch = MODEL.dispatch(1, picks)
    return dispatch, Partial.from_sums(1, MODEL.answer(NativeKernel(), dispatch), Grid.X32, 9)


def read(path: Path) -> tuple[dict, list[bytes]]:  # type: ignore[type-arg]
    data = path.read_bytes()
    assert data.startswith(MAGIC)
    at = 12 + int.from_bytes(data[8:12], "little")
    header, parts = json.loads(data[12:at]), []
    sizes = [header["request_bytes"], header["answer_bytes"], *(s["size_bytes"] for s in header["slices"])]
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    assert at == len(data)
    return header, parts


def test_an_answered_call_becomes_a_file_with_all_it_takes_to_compute_it_again(tmp_path: Path) -> None:
    keeper, (dispatch, partial) = recorder(tmp_path / "calls"), call([[0, 2], [2, 3]])
    keeper.sent(node(), PLAN, dispatch, 77, 500)
    keeper.answered(node(), 77, partial)
    keeper.close()
    [path] = (tmp_path / "calls").iterdir()
    header, (request, answer, *slices) = read(path)
    assert path.name == "n1.escall"
    assert Frame.decode(request).payload == dispatch.to_payload()
    assert Frame.decode(answer).payload == partial.to_payload()
    assert [each["expert"] for each in header["slices"]] == [0, 2, 3]
    assert [hashlib.sha256(data).hexdigest() for data in slices] == [MODEL.ids[1][e] for e in (0, 2, 3)]
    assert header["layer_exponents"] == [X32] and header["node"]["name"] == "node n1"


def test_only_the_first_answer_of_a_node_is_kept_and_only_of_so_many_nodes(tmp_path: Path) -> None:
    keeper, (dispatch, partial) = recorder(tmp_path), call([[0]])
    for number in range(MOST_RECORDS + 3):
        for call_id in (1, 2):
            keeper.sent(node(f"n{number}"), PLAN, dispatch, call_id, 500)
            keeper.answered(node(f"n{number}"), call_id, partial)
    keeper.close()
    assert len(list(tmp_path.iterdir())) == MOST_RECORDS


def test_a_call_whose_slices_are_too_large_waits_for_a_smaller_one(tmp_path: Path) -> None:
    keeper = recorder(tmp_path, most_bytes=2 * MODEL.formula.slice_bytes)
    for call_id, picks in enumerate(([[0, 1, 2]], [[3, 1]])):
        dispatch, partial = call(picks)
        keeper.sent(node(), PLAN, dispatch, call_id, 500)
        keeper.answered(node(), call_id, partial)
    keeper.close()
    header, _ = read(tmp_path / "n1.escall")
    assert [each["expert"] for each in header["slices"]] == [1, 3]


def test_an_answer_to_another_call_is_not_recorded(tmp_path: Path) -> None:
    keeper, (dispatch, partial) = recorder(tmp_path), call([[0]])
    keeper.sent(node(), PLAN, dispatch, 1, 500)
    keeper.answered(node(), 2, partial)
    keeper.answered(node("n2"), 1, partial)
    keeper.close()
    assert not list(tmp_path.iterdir())


def test_a_node_cannot_choose_where_its_record_goes(tmp_path: Path) -> None:
    folder, (dispatch, partial) = tmp_path / "inner", call([[0]])
    keeper = recorder(folder)
    keeper.sent(node("../../etc"), PLAN, dispatch, 1, 500)
    keeper.answered(node("../../etc"), 1, partial)
    keeper.close()
    assert [path.name for path in folder.iterdir()] == ["etc.escall"]


def test_a_full_disk_stops_the_record_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper, (dispatch, partial) = recorder(tmp_path / "calls"), call([[0]])
    (tmp_path / "calls").rmdir()
    (tmp_path / "calls").write_text("a file where the folder was")
    for name in ("n1", "n2", "n3"):
        keeper.sent(node(name), PLAN, dispatch, 1, 500)
        keeper.answered(node(name), 1, partial)
    keeper.close()
    assert caplog.text.count("calls cannot be recorded in") == 1
