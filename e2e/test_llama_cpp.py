"""Against plain llama.cpp only statistics can be promised: no further from it than it is from itself."""

from pathlib import Path

from backbone.gate.run import compare_with_llama_cpp
from e2e.swarm import swarm


async def test_the_swarm_is_no_further_from_llama_cpp_than_llama_cpp_from_itself(
    demo_model: Path, cache_dir: Path
) -> None:
    async with swarm(demo_model, cache_dir, nodes=1) as s:
        result = await compare_with_llama_cpp(demo_model, s.backbone.dispatcher.call)
        print("\n" + result.table())
        assert result.swarm.positions >= 300
        assert result.passed, "\n" + result.table()
