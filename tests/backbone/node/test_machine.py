"""The node's state machine: shared scenarios, and what holds for any order of events."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbone.node import events
from backbone.node.machine import (
    FINAL_CLOSES,
    OVERLOADED,
    NodeConfig,
    NodeMachine,
    State,
    backoff_s,
    reconnect_s,
)
from relay.wire.close import FATAL

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "node_machine.json").read_text())
EVENTS = events.Event.__value__.__args__


def from_json(value: dict[str, Any]) -> Any:
    """One event of the vectors as its dataclass."""
    cls = getattr(events, value["type"])
    arguments = {key: item for key, item in value.items() if key != "type"}
    if "call" in arguments:
        arguments["call"] = call_from_json(arguments["call"])
    if "assignment" in arguments:
        assignment = arguments["assignment"]
        layers = tuple(
            events.AssignedLayer(
                **{
                    **layer,
                    "experts": {int(e): s for e, s in layer["experts"].items()},
                    "grids": tuple(layer["grids"]),
                }
            )
            for layer in assignment["layers"]
        )
        arguments["assignment"] = events.Assignment(**{**assignment, "layers": layers})
    return cls(**arguments)


def call_from_json(value: dict[str, Any]) -> events.Call:
    return events.Call(**{**value, "experts": tuple(value["experts"])})


def to_json(value: Any) -> Any:
    """One effect as the vectors write it."""
    if isinstance(value, events.Call):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value) if f.name != "body"}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {"type": type(value).__name__} | {
            f.name: to_json(getattr(value, f.name)) for f in fields(value)
        }
    return value


@pytest.mark.parametrize("scenario", VECTORS["scenarios"], ids=lambda s: s["name"])
def test_machine_follows_the_scenario(scenario: dict[str, Any]) -> None:
    machine = NodeMachine(NodeConfig(**scenario["config"]), lambda: scenario["jitter"])
    for number, step in enumerate(scenario["steps"]):
        where = f"step {number}: {step.get('event', 'timer')}"
        now = step["at"]
        effects = (
            machine.handle_timer(now) if "timer" in step else machine.receive(from_json(step["event"]), now)
        )
        assert [to_json(effect) for effect in effects] == step["effects"], where
        if "state" in step:
            assert machine.state == step["state"], where
        if "next_timer" in step:
            assert machine.next_timer() == step["next_timer"], where


def test_scenarios_use_every_event_and_every_state() -> None:
    steps = [step for scenario in VECTORS["scenarios"] for step in scenario["steps"]]
    assert {step["event"]["type"] for step in steps if "event" in step} == {cls.__name__ for cls in EVENTS}
    assert {step["state"] for step in steps if "state" in step} == {state.value for state in State}


def test_closes_after_which_a_node_stops_are_those_the_protocol_calls_fatal() -> None:
    assert set(FINAL_CLOSES) == FATAL


def test_backoff_grows_to_its_cap_and_never_falls_below_half() -> None:
    assert [backoff_s(n, 1.0) for n in (0, 1, 2, 6, 500)] == [0.5, 1.0, 2.0, 30.0, 30.0]
    assert backoff_s(0, 0.0) == 0.25
    assert [reconnect_s(1006, n, 1.0) for n in (0, 1, 2, 3, 500)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert reconnect_s(OVERLOADED, 0, 1.0) == 30.0


def _call(call_id: int, expert: int, epoch: int, deadline_ms: int) -> events.Call:
    return events.Call(9, call_id, epoch, deadline_ms, 77, 0, 64, 0, 1, (expert,))


def _assignment(epoch: int, experts: list[int]) -> events.Assignment:
    layer = events.AssignedLayer(0, {e: f"{e:064x}" for e in experts}, 100, 64, (0,))
    return events.Assignment(epoch, 9, 77, (layer,) if experts else ())


any_event = st.one_of(
    st.sampled_from([
        events.Start(), events.KernelTested("fake", 1.0), events.KernelFault("no"), events.Welcomed(),
        events.PauseAsked(), events.ResumeAsked(), events.LeaveAsked("x"), events.SleepAsked("x"),
        events.Woke(), events.NetworkChanged(), events.DrainReceived(1.0),
    ]),
    st.builds(events.Closed, st.sampled_from([0, 1006, 4400, 4401, 4409]), st.just("")),
    st.builds(
        events.Assigned,
        st.builds(_assignment, st.integers(1, 3), st.lists(st.integers(0, 5), unique=True)),
    ),
    st.builds(events.SliceLoaded, st.integers(0, 5).map(lambda e: f"{e:064x}")),
    st.builds(events.SliceFailed, st.integers(0, 5).map(lambda e: f"{e:064x}"), st.just("x")),
    st.builds(events.SlicesLost, st.sampled_from([(f"{0:064x}",), (f"{1:064x}", f"{9:064x}"), ()])),
    st.builds(
        events.DispatchReceived,
        st.builds(_call, st.integers(0, 9), st.integers(0, 5), st.integers(1, 3), st.sampled_from([0, 50])),
    ),
    st.builds(events.CancelReceived, st.just(9), st.integers(0, 9)),
    st.builds(events.CallComputed, st.integers(0, 9), st.just("r")),
    st.builds(events.CallFailed, st.integers(0, 9), st.just("non_finite"), st.just("x")),
    st.none(),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(any_event, st.floats(0, 40)), max_size=60))
def test_whatever_happens_the_node_keeps_its_promises(history: list[tuple[Any, float]]) -> None:
    """Never more than the pledge or the threads; no call answered twice; a timer while it waits."""
    config = NodeConfig(memory_bytes=300, threads=2, queue_calls=3, parallel_fetches=2)
    machine = NodeMachine(config, lambda: 0.5)
    now, tickets, open_tickets, fetching = 0.0, set(), set(), set()
    for event, passed in [(events.Start(), 0.0), *history]:
        now += passed
        if isinstance(event, events.CallComputed | events.CallFailed):
            open_tickets.discard(event.ticket)
        if isinstance(event, events.SliceLoaded | events.SliceFailed):
            fetching.discard(event.slice)
        effects = machine.handle_timer(now) if event is None else machine.receive(event, now)
        for effect in effects:
            match effect:
                case events.Compute():
                    assert effect.ticket not in tickets
                    tickets.add(effect.ticket)
                    open_tickets.add(effect.ticket)
                case events.Reply():
                    assert isinstance(event, events.CallComputed) and event.ticket in tickets
                    tickets.discard(event.ticket)
                case events.FetchSlice():
                    assert effect.slice not in fetching
                    fetching.add(effect.slice)
                case events.StopFetch():
                    fetching.discard(effect.slice)
                case events.FreeSlice():
                    assert effect.slice not in machine.held
        assert len(open_tickets) <= config.threads
        assert len(fetching) <= config.parallel_fetches
        assert len(machine.held) * 100 <= config.memory_bytes
        if machine.state is State.CONNECTING and not machine.connected:
            assert machine.next_timer() is not None
