"""
What each parameter of a request may be: one table, from which the door checks. Pure.

A value that no request can mean is refused by name. A value beyond what it can bring about, such as looking
back further than the context is long, means the same as the largest useful one, and that is what the engine
gets: it would allocate what it is told.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backbone.gateway.errors import bad_request
from backbone.gateway.nesting import grammar_size, optional_elements

MAX_INT = (1 << 31) - 1
MAX_SAFE_INT = (1 << 53) - 1  # what schemas written by JavaScript say for "any"
MAX_JSON_DEPTH = 64
MAX_SCHEMA_DEPTH = 40  # a level of properties is two
MAX_SCHEMA_NODES = 2000
MAX_SCHEMA_BYTES = 128 << 10
MAX_SCHEMA_COUNT = 2000  # minItems, maxItems, minLength, maxLength: written out, one element each
MAX_GRAMMAR_BYTES = 64 << 10
MAX_GRAMMAR_DEPTH = 32
MAX_GRAMMAR_RULES = 1000
MAX_GRAMMAR_ELEMENTS = 4000
MAX_GRAMMAR_OPTIONAL = 48  # each in a row doubles the ways to read on, over the whole vocabulary
MAX_PATTERN_CHARS = 1000
MAX_DAY_MS = 86_400_000

type Bound = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter, under all its names. `bound` gives the value the engine gets, or raises Refused."""

    names: tuple[str, ...]
    meaning: str
    bound: Bound


def table(context: int, parallel: int, vocabulary: int = MAX_INT) -> list[Row]:
    """Give the table for slots of `context` tokens, `parallel` of them, and a model's vocabulary."""
    in_context = _whole(-1, MAX_INT, at_most=context)
    any_number = _number(-1e6, 1e6)
    share = _number(0, 1)
    return [
        Row(("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"),
            "tokens to generate; -1: until the model ends", in_context),
        Row(("n", "n_cmpl"), "answers to one prompt, a slot each", _whole(1, parallel)),
        Row(("best_of",), "only as many as n", _whole(1, parallel)),
        Row(("n_keep",), "tokens of the prompt to keep when the context shifts", in_context),
        Row(("n_discard", "n_cache_reuse", "min_keep"), "tokens", _whole(0, MAX_INT, at_most=context)),
        Row(("repeat_last_n", "dry_penalty_last_n"), "tokens to look back", in_context),
        Row(("dry_allowed_length",), "tokens", _whole(0, MAX_INT, at_most=context)),
        Row(("n_indent",), "white space at the start of a line", _whole(0, 1000)),
        Row(("n_probs", "top_logprobs"), "likely tokens told of each", _whole(0, min(1000, vocabulary))),
        Row(("logprobs",), "whether, or how many, likely tokens are told", _either(_flag, _whole(0, 1000))),
        Row(("top_k",), "likely tokens to choose from; 0: all", _whole(-1, MAX_INT, at_most=vocabulary)),
        Row(("id_slot",), "slot; -1: any", _whole(-1, parallel - 1)),
        Row(("seed",), "of the random numbers; -1: any", _whole(-1, (1 << 32) - 1)),
        Row(("mirostat",), "0, 1 or 2", _whole(0, 2)),
        Row(("t_max_predict_ms", "t_max_prompt_ms"), "longest time", _whole(-1, MAX_DAY_MS, MAX_DAY_MS)),
        Row(("sse_ping_interval",), "seconds; -1: never", _whole(-1, 3600)),
        Row(("reasoning_budget_tokens", "thinking_budget_tokens"), "tokens to think", in_context),
        Row(("temperature",), "0: the likeliest token", _number(-1e6, 1e6)),
        Row(("top_p", "min_p", "xtc_probability", "xtc_threshold"), "share of probability", any_number),
        Row(("typical_p", "top_n_sigma", "dynatemp_range", "dynatemp_exponent", "repeat_penalty",
             "frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base", "mirostat_tau",
             "mirostat_eta", "adaptive_target"), "a number", any_number),
        Row(("adaptive_decay", "slot_prompt_similarity"), "a share", share),
        Row(("stream", "cache_prompt", "return_tokens", "return_progress", "timings_per_token",
             "ignore_eos", "post_sampling_probs", "backend_sampling", "verbose", "echo", "parse_tool_calls",
             "parallel_tool_calls", "add_generation_prompt", "reasoning_control"), "true or false", _flag),
        Row(("stream_options", "chat_template_kwargs", "metadata"), "an object", _fields(64)),
        Row(("stop", "stop_sequences"), "texts that end the answer", _texts(64, 512)),
        Row(("dry_sequence_breakers",), "texts that end a repetition", _texts(32, 64)),
        Row(("samplers",), "names of samplers, in order", _texts(32, 64)),
        Row(("response_fields",), "fields of the answer", _texts(128, 256)),
        Row(("logit_bias",), "tokens made more or less likely", _biases(2000)),
        Row(("lora",), "adapters", _items(16)),
        Row(("messages",), "turns of a conversation", _messages),
        Row(("tools",), "functions the model may call", _tools),
        Row(("tool_choice", "response_format", "thinking", "reasoning", "text"), "a name or an object",
            _either(_text(200), _fields(64))),
        Row(("json_schema",), "a schema the answer follows", _schema),
        Row(("grammar",), "a grammar (GBNF) the answer follows", _grammar),
        Row(("grammar_lazy",), "only whole grammars are taken here", _only(False)),
        Row(("chat_parser", "chat_format", "grammar_triggers", "grammar_type", "preserved_tokens",
             "generation_prompt", "reasoning_budget_start_tag", "reasoning_budget_end_tag",
             "reasoning_budget_end_tags", "reasoning_budget_message"),
            "said by the engine to itself, not by a client", _never),
        Row(("model", "user", "reasoning_format", "reasoning_effort", "service_tier", "suffix", "verbosity"),
            "a text", _either(_text(10_000_000), _fields(64))),
    ]  # fmt: skip


def check(body: dict[str, Any], rows: Mapping[str, Row]) -> dict[str, Any]:
    """
    Give the body the engine gets: each parameter bounded, null ones left out.

    Raises:
        Refused: 400, names the parameter, what it means, and what was found.
    """
    checked: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        row = rows.get(name)
        if row is None:
            checked[name] = value
            continue
        try:
            checked[name] = row.bound(name, value)
        except ValueError as exc:
            raise bad_request(f"{name} ({row.meaning}) must be {exc}, found {_shown(value)}") from None
    _require_numbers_in_reach(checked)
    return checked


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {name: row for row in rows for name in row.names}


def _require_numbers_in_reach(body: Mapping[str, Any]) -> None:
    """Whatever a number means, the engine reads it into 32 bits."""
    todo: list[tuple[str, Any, int]] = [(name, value, MAX_INT) for name, value in body.items()]
    while todo:
        name, value, most = todo.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise bad_request(f"{name}: not a finite number")
        if isinstance(value, int) and abs(value) > most and name != "seed":
            raise bad_request(f"{name}: {_shown(value)} is out of range")
        if isinstance(value, dict):
            inner = MAX_SAFE_INT if name in SCHEMA_FIELDS else most
            todo += [
                (key, each, MAX_SAFE_INT if key in SCHEMA_FIELDS else inner) for key, each in value.items()
            ]
        elif isinstance(value, list):
            todo += [(name, each, most) for each in value if isinstance(each, int | float | list | dict)]


SCHEMA_FIELDS = ("json_schema", "schema", "parameters", "input_schema")


# Bounds: a ValueError says what the value must be.


def _whole(least: int, most: int, at_most: int | None = None) -> Bound:
    def bound(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_SAFE_INT:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return value if at_most is None else min(value, at_most)

    return bound


def _number(least: float, most: float) -> Bound:
    def bound(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"a number from {least:g} to {most:g}")
        return value

    return bound


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _only(allowed: Any) -> Bound:
    def bound(name: str, value: Any) -> Any:
        if value != allowed:
            raise ValueError(f"{json.dumps(allowed)}")
        return value

    return bound


def _never(name: str, value: Any) -> Any:
    raise ValueError("left out")


def _text(most_bytes: int) -> Bound:
    def bound(name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value.encode()) > most_bytes:
            raise ValueError(f"a text of at most {most_bytes} bytes")
        return value

    return bound


def _texts(most: int, most_bytes: int) -> Bound:
    one = _text(most_bytes)

    def bound(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return one(name, value)
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"a text or at most {most} texts of at most {most_bytes} bytes")
        return [one(name, each) for each in value]

    return bound


def _fields(most: int) -> Bound:
    def bound(name: str, value: Any) -> Any:
        if not isinstance(value, dict) or len(value) > most:
            raise ValueError(f"an object of at most {most} fields")
        _check_schemas(name, value)
        return value

    return bound


def _items(most: int) -> Bound:
    def bound(name: str, value: Any) -> Any:
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"an array of at most {most}")
        return value

    return bound


def _either(*bounds: Bound) -> Bound:
    def bound(name: str, value: Any) -> Any:
        wanted = []
        for one in bounds:
            try:
                return one(name, value)
            except ValueError as exc:
                wanted.append(str(exc))
        raise ValueError(" or ".join(wanted))

    return bound


def _biases(most: int) -> Bound:
    amount = _either(_number(-1e6, 1e6), _only(False))
    token = _either(_text(256), _whole(0, MAX_INT))

    def bound(name: str, value: Any) -> Any:
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not isinstance(pairs, list) or len(pairs) > most:
            raise ValueError(f"at most {most} pairs of token and bias")
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError("pairs of token and bias")
            token(name, pair[0])
            amount(name, pair[1])
        return value

    return bound


MAX_MESSAGES = 4096
MAX_TOOLS = 256
NOT_TEXT = (
    "image_url",
    "image",
    "input_image",
    "input_audio",
    "audio",
    "input_video",
    "video",
    "file",
    "input_file",
)


def _messages(name: str, value: Any) -> Any:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise ValueError(f"an array of 1 to {MAX_MESSAGES} messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("objects with a role, a text")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise ValueError("objects whose content is a text, an array of parts, or null")
        _check_parts(content)
        calls = message.get("tool_calls")
        if not isinstance(calls, list | None) or not all(isinstance(call, dict) for call in calls or ()):
            raise ValueError("objects whose tool_calls are an array of objects")
    return value


def _check_parts(content: Any) -> None:
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError("objects whose content's parts have a type")
        if part["type"] in NOT_TEXT:
            raise ValueError(f"text alone (part of type {part['type']}): this model takes nothing else")


def _tools(name: str, value: Any) -> Any:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"an array of at most {MAX_TOOLS} tools")
    for tool in value:
        if not isinstance(tool, dict):
            raise ValueError("objects")
        described = tool.get("function", tool)
        if not isinstance(described, dict) or not isinstance(described.get("name", tool.get("type")), str):
            raise ValueError("objects with a function that has a name")
        _check_schemas(name, tool)
    return value


def _schema(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("an object")
    check_schema(value)
    return value


def _check_schemas(name: str, holder: Mapping[str, Any]) -> None:
    """Check the schemas in an object that may hold some: response_format, a tool."""
    todo: list[Any] = [holder]
    while todo:
        each = todo.pop()
        for key, value in each.items():
            if key in SCHEMA_FIELDS and isinstance(value, dict):
                check_schema(value)
            elif isinstance(value, dict):
                todo.append(value)


COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def check_schema(schema: Mapping[str, Any]) -> None:
    """
    Bound what llama.cpp makes a grammar of: nesting, size, repetitions, references.

    Raises:
        ValueError: says what it must be.
    """
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema of at most {MAX_SCHEMA_BYTES} bytes")
    nodes = 0
    todo: list[tuple[Any, int]] = [(schema, 1)]
    while todo:
        node, depth = todo.pop()
        nodes += 1
        if depth > MAX_SCHEMA_DEPTH or nodes > MAX_SCHEMA_NODES:
            limits = f"{MAX_SCHEMA_DEPTH} levels and {MAX_SCHEMA_NODES} nodes"
            raise ValueError(f"a schema of at most {limits}")
        if isinstance(node, list):
            todo += [(each, depth + 1) for each in node if isinstance(each, dict | list)]
            continue
        for name, value in node.items():
            if name in COUNTS and isinstance(value, int | float) and not 0 <= value <= MAX_SCHEMA_COUNT:
                raise ValueError(f"a schema whose {name} is from 0 to {MAX_SCHEMA_COUNT}")
            if name == "$ref" and isinstance(value, str) and not value.startswith("#"):
                raise ValueError("a schema that refers to nothing outside itself")
            if name == "pattern" and isinstance(value, str):
                _check_pattern(value)
            if isinstance(value, dict | list):
                todo.append((value, depth + 1))
    _check_references(schema)


def _check_references(schema: Mapping[str, Any]) -> None:
    """A chain of references is as deep as nesting; one that ends nowhere is no schema."""
    seen: set[str] = set()
    reference = schema.get("$ref")
    while isinstance(reference, str):
        if reference in seen or len(seen) > MAX_SCHEMA_DEPTH:
            raise ValueError("a schema whose references lead to something")
        seen.add(reference)
        node: Any = schema
        for step in reference.removeprefix("#").strip("/").split("/"):
            node = node.get(step) if isinstance(node, dict) and step else node
        reference = node.get("$ref") if isinstance(node, dict) else None


def _check_pattern(pattern: str) -> None:
    depth, _, size = grammar_size(pattern)
    if len(pattern) > MAX_PATTERN_CHARS or depth > MAX_GRAMMAR_DEPTH or size > MAX_GRAMMAR_ELEMENTS:
        raise ValueError(
            f"a schema whose patterns are at most {MAX_PATTERN_CHARS} characters and not nested deeply"
        )


def _grammar(name: str, value: Any) -> Any:
    if not isinstance(value, str) or len(value.encode()) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"a text of at most {MAX_GRAMMAR_BYTES} bytes")
    depth, rules, size = grammar_size(value)
    optional = optional_elements(value)
    if (
        depth > MAX_GRAMMAR_DEPTH
        or rules > MAX_GRAMMAR_RULES
        or size > MAX_GRAMMAR_ELEMENTS
        or optional > MAX_GRAMMAR_OPTIONAL
    ):
        raise ValueError(
            f"a grammar of at most {MAX_GRAMMAR_DEPTH} groups in each other, {MAX_GRAMMAR_RULES} rules, "
            f"{MAX_GRAMMAR_OPTIONAL} optional and {MAX_GRAMMAR_ELEMENTS} elements, repetitions written out"
        )
    return value


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a very large number"
    return text if len(text) <= 100 else text[:97] + "..."
