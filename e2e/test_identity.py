"""The promise: no shape of the swarm, no failure and no hedge changes a bit of the logits."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from backbone.experts.deadlines import DeadlinePolicy
from backbone.experts.tally import Tally
from backbone.gate.logits import Generation, greedy
from backbone.lanes.direct import ListenAt
from e2e.browser.tab import Tab, chromium
from e2e.conftest import NUM_TOKENS
from e2e.swarm import Swarm, swarm, until, while_running
from tests.fakes.linked import EAGER
from tests.fakes.lying_node import Vice

# Where a test says who computed what, a machine busy with tests must not count as a failing node.
PATIENT = DeadlinePolicy(floor_s=10.0, first_s=20.0, ceiling_s=30.0)


def same_bits(found: list[Generation], reference: list[Generation]) -> None:
    """3 prompts x 48 tokens: ids and every logit."""
    for ours, theirs in zip(found, reference, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logits.shape == (NUM_TOKENS, theirs.logits.shape[1])
        assert ours.logits.tobytes() == theirs.logits.tobytes()


def rows_of(swarm: Swarm) -> dict[str, int]:
    """Expert rows by holder, by name."""
    return {work.name: sum(work.rows.values()) for work in swarm.backbone.dispatcher.tally.work.values()}


@pytest.mark.parametrize("nodes", [1, 2, 5])
async def test_any_number_of_nodes_gives_the_same_logits(
    nodes: int, demo_model: Path, cache_dir: Path, prompts: list[list[int]], reference: list[Generation]
) -> None:
    async with swarm(
        demo_model, cache_dir, nodes=nodes, share=1.0 if nodes == 1 else 0.7, deadlines=PATIENT
    ) as s:
        same_bits(await greedy(demo_model, prompts, NUM_TOKENS, swarm=s.backbone.dispatcher.call), reference)
        rows = rows_of(s)
        assert Tally.LOCAL_NAME not in rows  # every row was computed by a node
        assert len(rows) == nodes and all(rows.values())


async def test_wasm_and_native_nodes_together_give_the_same_logits(
    demo_model: Path, cache_dir: Path, prompts: list[list[int]], reference: list[Generation]
) -> None:
    async with chromium() as browser, swarm(demo_model, cache_dir, nodes=1, deadlines=PATIENT) as s:
        tab = await Tab.open(browser, s.relay.url)
        await s.until_covered(2)
        kernels = {node.kernel.split("-")[0] for node in s.backbone.dispatcher.nodes.by_id.values()}
        assert kernels == {"wasm", "native"}
        s.backbone.dispatcher.tally.clear()
        same_bits(await greedy(demo_model, prompts, NUM_TOKENS, swarm=s.backbone.dispatcher.call), reference)
        assert len(rows_of(s)) == 2 and all(rows_of(s).values())
        assert tab.complaints == []


async def test_the_x16_grid_does_not_depend_on_the_nodes_either(
    demo_model: Path, cache_dir: Path, prompts: list[list[int]]
) -> None:
    from relay.wire.tensors import Grid

    async with swarm(demo_model, cache_dir, nodes=2, share=0.7, grid=Grid.X16) as s:
        call, policy = s.backbone.dispatcher.call, s.backbone.dispatcher.policy
        found = await greedy(demo_model, prompts[:1], 16, swarm=call)
        s.backbone.dispatcher.policy = type(policy)(policy.deadlines, local_only=True)
        alone = await greedy(demo_model, prompts[:1], 16, swarm=call)
        assert found[0].logits.tobytes() == alone[0].logits.tobytes()


async def test_the_only_node_killed_in_mid_generation_changes_nothing(
    demo_model: Path, cache_dir: Path, prompts: list[list[int]], reference: list[Generation]
) -> None:
    async with swarm(demo_model, cache_dir, nodes=1) as s:

        async def kill_soon() -> None:
            await until(lambda: s.backbone.dispatcher.tally.layer_calls > 1500, "some tokens")
            s.kill(0)

        generation = greedy(demo_model, prompts, NUM_TOKENS, swarm=s.backbone.dispatcher.call)
        same_bits(await while_running(generation, kill_soon), reference)
        assert rows_of(s)["node-0"] > 0 and rows_of(s)[Tally.LOCAL_NAME] > 0
        dispatcher = s.backbone.dispatcher
        assert dispatcher.tally.longest_call_s <= dispatcher.policy.deadlines.first_s


async def test_one_of_two_nodes_killed_in_mid_generation_changes_nothing(
    demo_model: Path, cache_dir: Path, prompts: list[list[int]], reference: list[Generation]
) -> None:
    async with swarm(demo_model, cache_dir, nodes=2) as s:

        async def kill_soon() -> None:
            await until(lambda: s.backbone.dispatcher.tally.layer_calls > 1500, "some tokens")
            s.kill(1)

        generation = greedy(demo_model, prompts, NUM_TOKENS, swarm=s.backbone.dispatcher.call)
        same_bits(await while_running(generation, kill_soon), reference)


async def test_the_relay_restarted_in_mid_generation_changes_nothing_and_nodes_return(
    demo_model: Path, cache_dir: Path, prompts: list[list[int]], reference: list[Generation]
) -> None:
    async with swarm(demo_model, cache_dir, nodes=2, deadlines=PATIENT) as s:
        tally = s.backbone.dispatcher.tally

        async def restart_soon() -> None:
            await until(lambda: tally.layer_calls > 1500, "some tokens")
            await s.restart_relay()

        generation = greedy(demo_model, prompts, NUM_TOKENS, swarm=s.backbone.dispatcher.call)
        same_bits(await while_running(generation, restart_soon), reference)
        await s.until_covered(2)
        tally.clear()
        again = await greedy(demo_model, prompts[:1], 2, swarm=s.backbone.dispatcher.call)
        assert again[0].logits.tobytes() == reference[0].logits[:2].tobytes()
        assert Tally.LOCAL_NAME not in rows_of(s)


async def test_calls_that_leave_the_relay_and_come_back_change_nothing(
    demo_model: Path, cache_dir: Path, prompts: list[list[int]], reference: list[Generation]
) -> None:
    """Every lane that works is taken, and lost again and again in mid-generation."""
    async with swarm(demo_model, cache_dir, nodes=2, listen=ListenAt("127.0.0.1", 0), paths=EAGER) as s:
        chooser = s.backbone.chooser
        assert chooser is not None
        lost = 0

        async def lose_links() -> None:
            nonlocal lost
            while True:
                await asyncio.sleep(1.0)
                for lanes in list(chooser._peers.values()):
                    if lanes.in_use is not None:
                        lanes.in_use.ended(1006, "pulled out")
                        lost += 1

        generation = greedy(demo_model, prompts, NUM_TOKENS, swarm=s.backbone.dispatcher.call)
        same_bits(await while_running(generation, lose_links), reference)
        calls = sum((lanes.calls for lanes in chooser._peers.values()), start=Counter[str]())
        assert lost > 0 and calls["relayed"] > 0 and calls["direct"] + calls["webrtc"] > 0
        assert s.backbone.dispatcher.tally.failed_calls == 0


async def test_hedged_calls_change_nothing(
    demo_model: Path, cache_dir: Path, prompts: list[list[int]], reference: list[Generation]
) -> None:
    """A node that becomes slow is overtaken by its replica, or by this machine; both answers are good."""
    async with swarm(demo_model, cache_dir, liars=(Vice.NONE, Vice.NONE), hedge=True, deadlines=PATIENT) as s:
        await greedy(demo_model, prompts[:1], 4, swarm=s.backbone.dispatcher.call)  # so that p95 is known
        s.liars[0].vice = Vice.SLOW

        async def recover() -> None:
            await asyncio.sleep(2.0)
            s.liars[0].vice = Vice.NONE

        generation = greedy(demo_model, prompts, NUM_TOKENS, swarm=s.backbone.dispatcher.call)
        same_bits(await while_running(generation, recover), reference)
        assert s.backbone.dispatcher.tally.hedges > 0


@pytest.mark.parametrize(
    "vice",
    [Vice.WRONG_SIZE, Vice.WRONG_LAYER, Vice.GARBAGE, Vice.TWICE, Vice.NEVER, Vice.VANISH],
    ids=lambda v: v.name,
)
async def test_a_misbehaving_node_costs_retries_and_no_bit(
    vice: Vice, demo_model: Path, cache_dir: Path, prompts: list[list[int]], reference: list[Generation]
) -> None:
    quick = DeadlinePolicy(floor_s=0.3, first_s=0.5, ceiling_s=1.0)
    async with swarm(demo_model, cache_dir, liars=(vice,), deadlines=quick) as s:
        found = await greedy(demo_model, prompts[:1], 4, swarm=s.backbone.dispatcher.call)
        assert found[0].logits.tobytes() == reference[0].logits[:4].tobytes()
        assert s.liars[0].lies > 0
        tally = s.backbone.dispatcher.tally
        # Who answers everything twice floods: the relay may end its session, and that costs retries as well.
        assert tally.retries > 0 or vice is Vice.TWICE
        assert tally.failed_calls == 0
