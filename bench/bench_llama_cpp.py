"""
How far the swarm is from plain llama.cpp, beside how far llama.cpp's own settings are from each other.

All runs are over the same texts, teacher-forced, with the engine's settings as the reference. The swarm's run
goes through the whole dispatcher and its integer grid; where its experts are computed cannot matter.
"""

import asyncio
import os
from pathlib import Path

from table import Row, arguments, report

from backbone.config import Config, default_cache_dir
from backbone.gate.run import VARIANTS, compare_with_llama_cpp
from backbone.model.demo_model import ensure_demo_model
from backbone.server import Backbone
from relay.wire.tensors import Grid


async def run() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    cache_dir = default_cache_dir(os.environ)
    model = options.model or ensure_demo_model(cache_dir)
    rows: list[Row] = []
    for grid in (Grid.X32, Grid.X16):
        async with Backbone(Config(model=model, cache_dir=cache_dir, port=0, grid=grid)) as backbone:
            floor_wanted = {} if rows else VARIANTS  # the floor does not depend on the grid
            result = await compare_with_llama_cpp(model, backbone.dispatcher.call, variants=floor_wanted)
        for name, c in (result.floor | {f"the swarm, q8a + {grid.name.lower()}": result.swarm}).items():
            rows.append(
                dict(run=name, positions=c.positions, argmax=f"{c.argmax_agreement:.3f}",
                     cosine_mean=f"{c.cosine_mean:.5f}", cosine_worst=f"{c.cosine_worst:.4f}",
                     identical="yes" if c.identical else "no")
            )  # fmt: skip
    report(f"Against plain llama.cpp in the engine's settings, {model.name}", rows, options.json)


if __name__ == "__main__":
    asyncio.run(run())
