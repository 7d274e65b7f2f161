"""
Read a request: bytes to a checked body, and what of it is the prompt. Pure.

The order matters: size, then nesting, then JSON, then the table of limits; nothing recursive, and no
allocation that grows faster than the text, happens before the text is known to be harmless.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from backbone.gateway.errors import Refused, bad_request
from backbone.gateway.limits import MAX_JSON_DEPTH, Row, check
from backbone.gateway.nesting import json_depth
from backbone.gateway.suspects import fingerprint_of

MAX_BODY_BYTES = 32 << 20
MIN_BODY_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 64  # a token of text takes 4 bytes, written as escapes of JSON perhaps 24
MAX_PROMPTS = 64
THOUGHTS = re.compile(r"(?i)think|channel|reason")  # templates leave out old ones
CHECKED_BYTES_PER_TOKEN = 8  # a text longer than that may be too long: its tokens are counted


@dataclass(frozen=True, slots=True)
class Prepared:
    """
    A request the engine may see. texts: of each prompt what certainly becomes tokens; tokens: how many it
    has besides. seats: slots it takes.
    """

    path: str
    body: dict[str, Any]
    stream: bool
    seats: int
    texts: list[str]
    fingerprint: str
    size_bytes: int


def most_body_bytes(context: int) -> int:
    """Give the size of the largest body that can hold a prompt which fits the context."""
    return min(max(MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN * context), MAX_BODY_BYTES)


def parse(raw: bytes) -> dict[str, Any]:
    """
    Read a JSON object.

    Raises:
        Refused: 400.
    """
    depth = json_depth(raw)
    if depth > MAX_JSON_DEPTH:
        raise bad_request(f"the body is nested {depth} levels deep, at most {MAX_JSON_DEPTH} are allowed")
    try:
        text = raw.decode("utf-8-sig")
        body = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate is no text
    except (ValueError, RecursionError) as exc:
        raise bad_request(f"the body is not JSON: {str(exc)[:200]}") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


def prepare(path: str, raw: bytes, rows: Mapping[str, Row], context: int, vocabulary: int | None) -> Prepared:
    """
    Check a request for an answer of the model.

    Raises:
        Refused: 400, says what is wrong with it.
    """
    body = check(parse(raw), rows)
    prompts = _prompts(body)
    texts = []
    for prompt in prompts:
        tokens = [each for each in prompt if not isinstance(each, str)]
        if len(tokens) > context:
            raise too_long(len(tokens), context, "")
        for token in tokens:
            if not 0 <= token < (vocabulary or 1 << 31):
                raise bad_request(f"token {token} is none of the model's {vocabulary} tokens")
        texts.append("".join(each for each in prompt if isinstance(each, str)))
    seats = max(1, len(prompts)) * int(body.get("n", body.get("n_cmpl", 1)))
    stream = bool(body.get("stream", False))
    return Prepared(path, body, stream, seats, texts, fingerprint_of(path, body), len(raw))


def too_long(tokens: int, context: int, about: str) -> Refused:
    """Say that a prompt does not fit, as llama-server does."""
    message = f"the request has {about}{tokens} tokens and exceeds the available context of {context} tokens"
    return Refused(400, "context_length_exceeded", message)


def chunks_to_count(text: str, context: int, chunk_chars: int = 1 << 16) -> list[str]:
    """Cut a text that may be too long into pieces to be counted; none for a text that is short enough."""
    if len(text) <= CHECKED_BYTES_PER_TOKEN * context:
        return []
    return [text[at : at + chunk_chars] for at in range(0, len(text), chunk_chars)]


def _prompts(body: Mapping[str, Any]) -> list[list[str | int]]:
    """Give what certainly becomes tokens, by prompt; a template may leave out other texts."""
    if "prompt" in body:
        return _plain_prompts(body["prompt"])
    texts: list[str | int] = []
    for name in ("system", "instructions", "input_prefix", "input_suffix"):
        texts += _texts_of(body.get(name))
    for name in ("messages", "input"):
        value = body.get(name)
        for message in value if isinstance(value, list) else [{"role": "user", "content": value}]:
            if isinstance(message, dict) and message.get("role") in ("user", "system", "assistant"):
                found = _texts_of(message.get("content"))
                thoughts = message["role"] == "assistant" and any(THOUGHTS.search(text) for text in found)
                texts += [] if thoughts else found
    return [texts]


def _texts_of(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content.strip()]
    parts = content if isinstance(content, list) else []
    return [
        part["text"].strip() for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]


def _plain_prompts(prompt: Any) -> list[list[str | int]]:
    if isinstance(prompt, str):
        return [[prompt]]
    if isinstance(prompt, dict):
        return [[_prompt_string(prompt)]]
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(f"prompt must be a text, tokens, or an array of these, found {str(prompt)[:60]}")
    if all(isinstance(each, str | int) and not isinstance(each, bool) for each in prompt) and any(
        isinstance(each, int) for each in prompt
    ):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"at most {MAX_PROMPTS} prompts in one request, found {len(prompt)}")
    made: list[list[str | int]] = []
    for each in prompt:
        if isinstance(each, str):
            made.append([each])
        elif isinstance(each, dict):
            made.append([_prompt_string(each)])
        elif isinstance(each, list) and all(
            isinstance(t, str | int) and not isinstance(t, bool) for t in each
        ):
            made.append(each)
        else:
            raise bad_request(f"a prompt must be a text or tokens, found {str(each)[:60]}")
    return made


def _prompt_string(prompt: Mapping[str, Any]) -> str:
    text = prompt.get("prompt_string")
    if not isinstance(text, str) or prompt.get("multimodal_data"):
        raise bad_request("a prompt that is an object needs a prompt_string, and may hold text alone")
    return text
