"""Pieces of a stream, put together; a stream cut short is no answer."""

import json
from typing import Any

import pytest

from backbone.gateway.collect import Events, collect


def _chat(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
    }


CHAT = [
    _chat({"role": "assistant", "content": None}),
    _chat({"content": "a"}),
    _chat({"content": "b"}),
    _chat({}, "stop"),
]
PLAIN = [
    {"index": 0, "content": "a", "tokens": [1]},
    {"index": 0, "content": "", "tokens": [2], "stop": True},
]


def test_chat_pieces_are_joined() -> None:
    whole = collect("/v1/chat/completions", CHAT, {})
    message = {"role": "assistant", "content": "ab"}
    assert whole == {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }


def test_plain_pieces_are_joined() -> None:
    whole = collect("/completion", PLAIN, {"return_tokens": True})
    assert whole == {"index": 0, "content": "a", "tokens": [1, 2], "stop": True}


@pytest.mark.parametrize(("path", "events"), [("/v1/chat/completions", CHAT), ("/completion", PLAIN)])
def test_a_stream_cut_short_is_refused(path: str, events: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="no end"):
        collect(path, events[:-1], {})


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_do_not_depend_on_where_the_bytes_are_cut(size: int) -> None:
    data = (
        b": waiting\n\n"
        + b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in CHAT)
        + b"data: [DONE]\n\n"
    )
    events = Events()
    assert [e for at in range(0, len(data), size) for e in events.feed(data[at : at + size])] == CHAT
