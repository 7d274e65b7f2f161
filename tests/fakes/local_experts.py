"""All experts of a model on this machine, in float32 NumPy: the plainest answer a swarm could give."""

from functools import cache

import numpy as np

from backbone.engine.link import Floats, LayerCall
from backbone.model.gguf import Model
from backbone.model.quantise import dequantise


class LocalExperts:
    """Dequantises a layer when it is first asked for; counts what it was asked."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.calls = 0
        self.rows = 0
        self.most_rows = 0
        self.weights = cache(self._dequantised)

    async def __call__(self, call: LayerCall) -> Floats:
        return self.answer(call)

    def answer(self, call: LayerCall) -> Floats:
        self.calls += 1
        self.rows += len(call.x)
        self.most_rows = max(self.most_rows, len(call.x))
        gate, up, down = self.weights(call.layer)
        y = np.zeros_like(call.x)
        for expert in np.unique(call.ids):
            rows, picks = np.nonzero(call.ids == expert)
            x = call.x[rows]
            g = x @ gate[expert].T
            h = g / (1 + np.exp(-g)) * (x @ up[expert].T)
            y[rows] += call.weights[rows, picks][:, None] * (h @ down[expert].T)
        return y

    def _dequantised(self, layer: int) -> tuple[Floats, Floats, Floats]:
        """gate, up [num_experts, expert_dim, hidden_dim]; down [num_experts, hidden_dim, expert_dim]"""
        moe = self.model.layers[layer]
        f = moe.formula
        assert moe.gate is not None and f.gate_type is not None
        shape = (self.model.num_experts, f.expert_dim, f.hidden_dim)
        transposed = (self.model.num_experts, f.hidden_dim, f.expert_dim)
        return (
            _matrices(moe.gate, f.gate_type, shape),
            _matrices(moe.up, f.up_type, shape),
            _matrices(moe.down, f.down_type, transposed),
        )


def _matrices(data: np.ndarray, type_id: int, shape: tuple[int, int, int]) -> Floats:
    num_experts, rows, columns = shape
    if type_id in (0, 1):
        return data.view(np.float32 if type_id == 0 else np.float16).astype(np.float32).reshape(shape)
    return dequantise(data.reshape(num_experts * rows, -1), type_id).reshape(shape)
