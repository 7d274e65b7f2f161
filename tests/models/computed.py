"""What llama.cpp's graph makes of a file: starts the engine on it, answers nothing, and stops it."""

from pathlib import Path

import numpy as np

from backbone.engine.link import Floats, LayerCall
from backbone.engine.supervisor import Engine, EngineConfig
from backbone.model.gguf import Model, open_model


async def _zeros(call: LayerCall) -> Floats:
    return np.zeros_like(call.x)


async def computed(path: Path) -> Model:
    """Open a model as the engine computes it; raises what the backbone would raise."""
    model = open_model(path)
    config = EngineConfig(model=model.path, n_ctx=256, n_threads=1, ready_timeout_s=60.0)
    async with Engine(config, _zeros, model.formulas) as engine:
        return model.as_computed(engine.layers)
