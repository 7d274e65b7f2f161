"""The device recognises every way llama.cpp writes the experts of a layer, and refuses all others."""

import asyncio
import json
import sys
from typing import Any

import numpy as np
import pytest

from backbone.engine.link import Floats, LayerCall
from backbone.engine.link_server import LinkServer
from backbone.engine.supervisor import PACKAGE_ROOT
from tests.backbone.engine import graphs

RESIDUAL = 100.0  # what graphs.py adds to the experts' output, on the CPU


async def run(case: str) -> tuple[dict[str, Any], list[LayerCall]]:
    """Run one graph in a process of its own; the answer to a call is twice its input."""
    calls = []

    async def answer(call: LayerCall) -> Floats:
        calls.append(call)
        return call.x * 2

    link = LinkServer(answer)
    await link.open()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.backbone.engine.graphs", case, link.path,
            cwd=PACKAGE_ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, stderr.decode()
    finally:
        await link.close()
    return json.loads(stdout), calls


@pytest.mark.parametrize(
    ("case", "different"),
    [
        ("plain", {}),
        ("top_1", {}),
        ("biased", {"biased": True}),
        ("silu_and_mul", {}),
        ("merged", {}),
        ("merged_views", {}),
        ("relu_squared", {"activation": "relu2", "gate_type": None}),
        ("gelu", {"activation": "gelu"}),
        ("oai", {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0}),
        ("relu", {"activation": "relu"}),
        ("gelu_alone", {"activation": "gelu", "gate_type": None}),
        ("clamp", {"activation": "swiglu_clamp", "limit": 7.0}),
        ("clamped_silu", {"limit": 7.0}),
        ("situ", {"activation": "situ", "alpha": 4.0, "limit": 25.0}),
        ("situ_one_bound", {"activation": "situ", "alpha": 4.0}),
        ("scaled", {"scaled": True, "biased": True}),
        ("merged_scaled", {"scaled": True, "activation": "gelu"}),
        ("weight_before", {"weight_position": "before"}),
        ("weight_before_top_1", {"weight_position": "before"}),
    ],
)
async def test_experts_of_a_layer_are_one_call(case: str, different: dict[str, Any]) -> None:
    report, calls = await run(case)
    top_k = 1 if case.endswith("top_1") else graphs.K
    formula = {
        "hidden_dim": graphs.D, "expert_dim": graphs.F, "gate_type": 0, "up_type": 0, "down_type": 0,
        "activation": "silu", "alpha": 0.0, "limit": 0.0, "weight_position": "after", "biased": False,
        "scaled": False,
    }  # fmt: skip
    seen = {"layer": 5, "num_experts": graphs.E, "top_k": top_k, "formula": formula | different}
    assert report["refused"] is None
    assert report["seen"] == [seen]
    assert report["splits"] == 2  # the device's, then the CPU's addition of the residual
    [call] = calls
    assert call.layer == 5
    assert np.array_equal(call.x, graphs._x().reshape(graphs.T, graphs.D))
    assert np.array_equal(call.ids, graphs._ids()[:, :top_k])  # rows of the view, not of what it views
    assert np.array_equal(call.weights, graphs._router(top_k).reshape(graphs.T, top_k))
    assert np.array_equal(np.ravel(report["rows"]), call.x.ravel() * 2 + RESIDUAL)


@pytest.mark.parametrize(
    ("case", "op", "why"),
    [
        ("unknown_activation", "UNARY", "activation that is not known"),
        ("unknown_op", "MUL", "between up and down"),
        ("one_expert_missing", "ADD", "some of the chosen experts only"),
        ("weights_read_otherwise", None, "expected the sum"),
        ("weighted_twice", "MUL", "expected the product"),
        ("weight_before_one_product", "MUL_MAT_ID", "gate and up differ"),
        ("scaled_after_bias", "ADD_ID", "expected the product"),
        ("clamps_that_differ", "MUL", "clamps of gate and up"),
    ],
)
async def test_unknown_use_of_expert_weights_is_refused_by_name(case: str, op: str | None, why: str) -> None:
    report, calls = await run(case)
    assert report["status"] == -1
    assert not calls
    assert why in report["refused"]["why"]
    assert report["refused"]["layer"] == 5
    assert op in (None, report["refused"]["op"])
