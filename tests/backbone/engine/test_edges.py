"""
Experts at the edge of a file or shard: llama.cpp unmaps that part once it has loaded.

Whoever remembers its addresses gives back memory of others: the engine died in most starts of such files.
"""

import asyncio
import re
from pathlib import Path

import pytest

from backbone.engine.supervisor import Engine, EngineConfig
from backbone.model.gguf import open_model
from backbone.model.random_model import Shape, make_random_moe
from tests.backbone.engine.test_supervisor import complete, formulas
from tests.fakes.local_experts import LocalExperts
from tests.models.rewrite import rewrite

# 9 MB a matrix: 27 MB of experts begin the file, 27 MB end it.
WIDE = Shape(num_layers=2, num_experts=32, expert_dim=1024)
STARTS = 10


def edges(name: str) -> int:
    """Order: the experts of layer 0, everything else, the experts of layer 1."""
    found = re.match(r"blk\.(\d+)\.ffn_\w+_exps\.weight$", name)
    return 0 if found is None else (-1, 1)[int(found[1])]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_moe(tmp_path_factory.mktemp("wide") / "wide.gguf", WIDE)


def smaps_kb(pid: int, name: str) -> int:
    """Resident kilobytes of the mappings of files whose path holds `name` (proc_pid_smaps(5))."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = name in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.parametrize("per_shard", [0, 2], ids=["single", "split"])
async def test_experts_at_the_edge_of_a_file_leave_every_start_alone(
    wide_model: Path, tmp_path: Path, per_shard: int
) -> None:
    path = rewrite(wide_model, tmp_path / "edges.gguf", edges, per_shard)
    model = open_model(path)
    experts = LocalExperts(model)
    answers = set()
    for _ in range(STARTS):
        config = EngineConfig(model=path, n_ctx=512, n_threads=1, ready_timeout_s=60.0, call_timeout_s=10.0)
        async with Engine(config, experts, formulas(model)) as engine:
            answers.add(await asyncio.wait_for(complete(engine), 30))
            assert engine.starts == 1
            assert engine.pid is not None
            held = smaps_kb(engine.pid, "edges")
            assert held * 1024 < 0.25 * model.expert_bytes, f"{held} kB of the file are resident"
    assert len(answers) == 1
