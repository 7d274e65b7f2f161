"""
Run a model over some texts with llama.cpp in several settings and with the swarm, and compare.

What can be promised against llama.cpp is statistics: integer kernels round activations, so any difference,
of batch shapes, of attention kernels, of the layout of weights, grows to a few percent of a small model's
logits. The floor is how far llama.cpp, set differently, is from itself; the swarm must not be further from
llama.cpp than that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbone.engine.link_server import OnCall
from backbone.gate.compare import Comparison, compare_logits, worst_of
from backbone.gate.llama_api import Settings
from backbone.gate.logits import teacher_forced_logits, tokenise

# What differs from the reference; the reference is what the engine uses.
REFERENCE = Settings()
VARIANTS = {
    "llama.cpp, weights repacked": Settings(repack=True),
    "llama.cpp, 1 thread": Settings(n_threads=1),
    "llama.cpp, 3 tokens at a time": Settings(n_ubatch=3),
    "llama.cpp, plain attention": Settings(flash_attention=False),
    "llama.cpp, attention in float32": Settings(flash_attention=False, cache_f32=True),
}

# Prose, dialogue, code, numbers, another language: over 300 positions with most tokenizers.
TEXTS = (
    "The capital of France is Paris, a city on the river Seine. It has been the centre of French politics "
    "for more than a thousand years, and its museums, bridges and bakeries draw visitors from every country.",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nSunlight is made of many "
    "colours. Air scatters short waves more than long ones: blue light comes from everywhere.<|im_end|>\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n"
    "for i in range(10):\n    print(i, fibonacci(i))\n",
    "In 1969 two men walked on the moon. The journey of 384,400 kilometres took 76 hours; 12 people have "
    "been there since, the last in December 1972. They brought back 382 kilograms of rock, dust and stones.",
    "Es war einmal ein König, der hatte drei Töchter. Die jüngste ging jeden Tag zum Brunnen im Wald und "
    "warf eine goldene Kugel in die Luft, bis sie eines Tages ins Wasser fiel.",
    "To make bread you need flour, water, salt and yeast. Mix them, knead the dough for ten minutes, let it "
    "rise for an hour, and bake it until the crust is brown and sounds hollow when you knock on it.",
)


@dataclass(frozen=True, slots=True)
class GateResult:
    """Every comparison is with the reference run of plain llama.cpp."""

    floor: dict[str, Comparison]  # llama.cpp in other settings
    swarm: Comparison

    @property
    def passed(self) -> bool:
        """The swarm is no further from llama.cpp than llama.cpp, set differently, is."""
        return self.swarm.no_worse_than(worst_of(list(self.floor.values())))

    def table(self) -> str:
        """The figures as text, one run a line."""
        return format_table(self.floor | {"the swarm": self.swarm})


async def compare_with_llama_cpp(
    model: Path,
    swarm: OnCall,
    texts: Sequence[str] = TEXTS,
    variants: Mapping[str, Settings] = VARIANTS,
) -> GateResult:
    """
    Measure the floor and the swarm on the same texts.

    Raises:
        EngineError: a run failed.
    """
    sequences = await tokenise(model, texts)
    reference = await teacher_forced_logits(model, sequences, settings=REFERENCE)
    floor = {}
    for name, settings in variants.items():
        logits = await teacher_forced_logits(model, sequences, settings=settings)
        floor[name] = compare_logits(reference, logits)
    ours = await teacher_forced_logits(model, sequences, swarm=swarm, settings=REFERENCE)
    return GateResult(floor, compare_logits(reference, ours))


def format_table(rows: dict[str, Comparison]) -> str:
    """One line a run: positions, argmax agreement, mean and worst cosine of the logits."""
    width = max(len(name) for name in rows)
    lines = [f"{'against plain llama.cpp':<{width}}  positions  argmax   cosine mean  cosine worst"]
    for name, c in rows.items():
        same = "  (identical)" if c.identical else ""
        lines.append(
            f"{name:<{width}}  {c.positions:9d}  {c.argmax_agreement:6.3f}   {c.cosine_mean:11.6f}  "
            f"{c.cosine_worst:12.6f}{same}"
        )
    return "\n".join(lines)
