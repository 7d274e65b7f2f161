"""
Put a streamed answer of llama-server together again. Pure.

The engine notices that nobody listens only while it streams, so it always streams; who asked for a whole
answer gets the one it would have given.

    /completion …            content, tokens and probabilities are joined onto the last event of each prompt
    /v1/completions          text and logprobs are joined by choice
    /v1/chat/completions     deltas are joined by choice: content, reasoning, tool calls, logprobs
    /v1/responses            the event response.completed holds everything
    /v1/messages             blocks are joined by index
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

MAX_EVENT_BYTES = 64 << 20  # the last event of /completion repeats the prompt


class Events:
    """Cut a stream of server-sent events into the JSON values of their data; comments and [DONE] fall out."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """
        Raises:
            ValueError: no JSON where it should be, or an event without end.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError("an event without end")
        found = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text and text != b"[DONE]":
                value = json.loads(text)
                if isinstance(value, dict):
                    found.append(value)
        return found


def collect(path: str, events: Iterable[Mapping[str, Any]], body: Mapping[str, Any]) -> Any:
    """
    Give the whole answer.

    Raises:
        ValueError: the stream is not whole.
    """
    events = list(events)
    if path.endswith("/responses"):
        return _responses(events)
    if path.endswith("/messages"):
        return _messages(events)
    if path.endswith("/chat/completions"):
        return _choices(events, "chat.completion", _chat_choice)
    if path == "/v1/completions":
        return _choices(events, "text_completion", _text_choice)
    return _plain(events, body)


def _plain(events: list[Mapping[str, Any]], body: Mapping[str, Any]) -> Any:
    answers: dict[int, dict[str, Any]] = {}
    joined: dict[int, dict[str, Any]] = {}
    for event in events:
        index = event.get("index", 0)
        parts = joined.setdefault(index, {"content": "", "tokens": [], "completion_probabilities": []})
        parts["content"] += event.get("content") or ""
        parts["tokens"] += event.get("tokens") or []
        parts["completion_probabilities"] += event.get("completion_probabilities") or []
        if event.get("stop"):
            answers[index] = dict(event)
    if not answers or len(answers) < len(joined):
        raise ValueError("the answer has no end")
    for index, answer in answers.items():
        parts = joined[index]
        answer["content"] = parts["content"]
        answer["tokens"] = parts["tokens"] if body.get("return_tokens") else []
        if parts["completion_probabilities"]:
            answer["completion_probabilities"] = parts["completion_probabilities"]
        if isinstance(answer.get("generation_settings"), dict):
            answer["generation_settings"] = answer["generation_settings"] | {"stream": False}
        if body.get("response_fields"):
            answers[index] = _fields_of(answer, body["response_fields"])
    whole = [answers[index] for index in sorted(answers)]
    return whole if len(whole) > 1 else whole[0]


def _fields_of(answer: Mapping[str, Any], fields: list[str]) -> dict[str, Any]:
    """Give some fields only; a slash leads into an object, and stays in the name."""
    chosen = {}
    for field in fields:
        value: Any = answer
        for step in field.split("/"):
            value = value.get(step) if isinstance(value, Mapping) else None
        if value is not None:
            chosen[field] = value
    return chosen


def _choices(events: list[Mapping[str, Any]], kind: str, join: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for name, value in event.items():
            if name == "choices":
                for choice in value:
                    index = choice.get("index", 0)
                    join(choices.setdefault(index, {"index": index, "finish_reason": None}), choice)
            elif name != "prompt_progress":
                whole[name] = value
    if not choices or any(choice["finish_reason"] is None for choice in choices.values()):
        raise ValueError("the answer has no end")
    return {"choices": [choices[index] for index in sorted(choices)]} | whole | {"object": kind}


def _join_logprobs(whole: dict[str, Any], choice: Mapping[str, Any]) -> None:
    if (choice.get("logprobs") or {}).get("content"):
        whole.setdefault("logprobs", {"content": []})["content"] += choice["logprobs"]["content"]


def _text_choice(whole: dict[str, Any], choice: Mapping[str, Any]) -> None:
    whole["text"] = whole.get("text", "") + (choice.get("text") or "")
    whole.setdefault("logprobs", None)
    if (choice.get("logprobs") or {}).get("content"):
        whole["logprobs"] = whole["logprobs"] or {"content": []}
        _join_logprobs(whole, choice)
    whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]


def _chat_choice(whole: dict[str, Any], choice: Mapping[str, Any]) -> None:
    message = whole.setdefault("message", {"role": "assistant", "content": None})
    for name, value in (choice.get("delta") or {}).items():
        if name == "tool_calls":
            _join_calls(message.setdefault("tool_calls", []), value)
        elif name in ("content", "reasoning_content") and value is not None:
            message[name] = (message.get(name) or "") + value
        elif value is not None:
            message[name] = value
    _join_logprobs(whole, choice)
    whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
    if whole["finish_reason"] and message["content"] is None:
        message["content"] = ""


def _join_calls(calls: list[dict[str, Any]], deltas: list[Mapping[str, Any]]) -> None:
    for delta in deltas:
        index = delta.get("index", len(calls))
        while len(calls) <= min(index, 1000):
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[index]
        call.update({name: value for name, value in delta.items() if name not in ("function", "index")})
        for name, text in (delta.get("function") or {}).items():
            call["function"][name] = call["function"].get(name, "") + (text or "")


def _responses(events: list[Mapping[str, Any]]) -> dict[str, Any]:
    for event in reversed(events):
        if event.get("type") in ("response.completed", "response.incomplete"):
            whole = dict(event["response"])
            return {"completed_at": whole.get("created_at")} | whole
    raise ValueError("the answer has no end")


def _messages(events: list[Mapping[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    ended = False
    for event in events:
        match event.get("type"):
            case "message_start":
                message = dict(event["message"])
            case "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                _join_block(blocks[event["index"]], event["delta"])
            case "message_delta":
                message.update(event["delta"])
                message["usage"] = message.get("usage", {}) | event.get("usage", {})
            case "message_stop":
                ended = True
    if not ended:
        raise ValueError("the answer has no end")
    for block in blocks.values():
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json") or "{}")
    return message | {"content": [blocks[index] for index in sorted(blocks)]}


def _join_block(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    match delta.get("type"):
        case "text_delta":
            block["text"] = block.get("text", "") + delta["text"]
        case "thinking_delta":
            block["thinking"] = block.get("thinking", "") + delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            block["partial_json"] = block.get("partial_json", "") + delta["partial_json"]
