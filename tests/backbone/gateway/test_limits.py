"""What a request may say: the table, the nesting, and bodies of any bytes."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.gateway.errors import Refused
from backbone.gateway.limits import MAX_JSON_DEPTH, MAX_SCHEMA_DEPTH, by_name, check, table
from backbone.gateway.nesting import grammar_size, json_depth
from backbone.gateway.prompts import chunks_to_count, parse, prepare

ROWS = by_name(table(context=512, parallel=2, vocabulary=1000))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[dict[str, Any]] = [
    {"repeat_last_n": 1 << 31},
    {"n_predict": 1 << 40},
    {"max_tokens": "many"},
    {"max_tokens": 1.5},
    {"n": 3},
    {"n_probs": 100_000},
    {"top_logprobs": -1},
    {"logprobs": 1 << 30},
    {"id_slot": 2},
    {"seed": 1 << 32},
    {"n_indent": 1 << 30},
    {"t_max_predict_ms": 1 << 60},
    {"temperature": "hot"},
    {"temperature": True},
    {"temperature": 1e30},
    {"stream": 1},
    {"stop": ["a"] * 65},
    {"stop": ["a" * 513]},
    {"stop": [1]},
    {"dry_sequence_breakers": ["x"] * 1000},
    {"samplers": ["top_k"] * 1000},
    {"logit_bias": {str(n): 1 for n in range(3000)}},
    {"logit_bias": [[1]]},
    {"lora": [{}] * 17},
    {"messages": []},
    {"messages": [{"role": 1, "content": "a"}]},
    {"messages": [{"role": "user", "content": 1}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]},
    {"messages": [{"role": "user", "content": "a"}] * 5000},
    {"tools": {}},
    {"tools": [1]},
    {"tools": [{"type": "function", "function": 1}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(40)}}]},
    {"tools": [{"name": "f", "input_schema": nested(40)}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(40)}}},
    {"text": {"format": {"type": "json_schema", "schema": nested(40)}}},
    {"json_schema": nested(MAX_SCHEMA_DEPTH + 1)},
    {"json_schema": {"$ref": "https://example.com/schema"}},
    {"json_schema": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}},
    {"json_schema": {"type": "string", "minLength": 1 << 20}},
    {"json_schema": {"type": "array", "items": {}, "maxItems": 1 << 20}},
    {"json_schema": {"type": "string", "pattern": "^" + "(" * 100 + ")" * 100 + "$"}},
    {"json_schema": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}},
    {"json_schema": {"enum": ["x" * 1000] * 1000}},
    {"grammar": "root ::= " + "(" * 33 + '"a"' + ")" * 33},
    {"grammar": 'root ::= (("a"{1000}){1000}){1000}'},
    {"grammar": 'root ::= "a"{2000000000}'},
    {"grammar": "\n".join(f"r{n} ::= r{n + 1}" for n in range(2000))},
    {"grammar": "x" * 100_000},
    {"grammar": "root ::= " + '"a"? ' * 400},
    {"grammar_lazy": True},
    {"grammar_triggers": [{"type": 3, "value": "(a|b)*"}]},
    {"chat_parser": "{}"},
    {"chat_format": 99},
    {"something_new": 1 << 31},
    {"something": {"deeper": [1, {"still": -(1 << 40)}]}},
]


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: json.dumps(body)[:50])
def test_what_no_request_can_mean_is_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        check(body, ROWS)
    assert caught.value.status == 400
    assert next(iter(body)) in caught.value.message or "deeper" in str(body)
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("given_value", "taken"),
    [
        ({"repeat_last_n": (1 << 31) - 1}, {"repeat_last_n": 512}),
        ({"dry_penalty_last_n": -1}, {"dry_penalty_last_n": -1}),
        ({"max_tokens": 128_000}, {"max_tokens": 512}),
        ({"max_tokens": 8.0}, {"max_tokens": 8}),
        ({"top_k": 1 << 20}, {"top_k": 1000}),
        ({"stop": None, "tools": None}, {}),
    ],
)
def test_what_means_the_same_as_the_largest_useful_value_becomes_it(
    given_value: dict[str, Any], taken: dict[str, Any]
) -> None:
    assert check(given_value, ROWS) == taken


@pytest.mark.parametrize(
    "body",
    [
        {"seed": (1 << 32) - 1, "temperature": 0, "top_p": 0.9, "stop": ["\n"], "n": 2, "logprobs": True},
        {"logit_bias": {"15": -100, "word": False}, "logprobs": 5, "stream_options": {"include_usage": True}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "user": "me"},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(10)}}]},
        {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}},
        {"tools": [{"type": "web_search"}], "thinking": {"type": "enabled", "budget_tokens": 100}},
        {"json_schema": {"type": "integer", "maximum": (1 << 53) - 1, "minimum": 0}},
        {"json_schema": {"$ref": "#/$defs/node", "$defs": {"node": {"properties": {"n": {"$ref": "#"}}}}}},
        {"grammar": 'root ::= "(" expr ")" [(a-z)]{1,20} # ((((\nexpr ::= "x" | ("y" "z")+'},
        {"unknown": "is left to the engine", "metadata": {"a": "b"}},
    ],
    ids=lambda body: json.dumps(body)[:50],
)
def test_what_clients_really_send_passes_as_it_is(body: dict[str, Any]) -> None:
    assert check(body, ROWS) == body


@given(st.binary(max_size=300))
def test_any_bytes_are_a_body_or_refused(raw: bytes) -> None:
    try:
        prepare("/completion", raw, ROWS, 512, 1000)
    except Refused as exc:
        assert exc.status == 400


NAMES = [*ROWS, "prompt", "input", "system", "x"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_any_json_is_a_request_or_refused(body: dict[str, Any]) -> None:
    try:
        prepared = prepare("/v1/chat/completions", json.dumps(body).encode(), ROWS, 512, 1000)
    except Refused as exc:
        assert exc.status == 400
    else:
        assert json.dumps(prepared.body, allow_nan=False)


@given(JSON)
def test_depth_is_counted_as_it_is(value: Any) -> None:
    def depth(each: Any) -> int:
        inside = each.values() if isinstance(each, dict) else each if isinstance(each, list) else None
        return 0 if inside is None else 1 + max((depth(e) for e in inside), default=0)

    assert json_depth(json.dumps(value).encode()) == depth(value)


def test_deep_nesting_is_refused_before_anything_recursive_reads_it() -> None:
    for raw in (b"[" * 500_000, b'{"a":' * 100_000, b'{"a":"' + b"[" * 100 + b'"}'):
        if json_depth(raw) <= MAX_JSON_DEPTH:
            assert parse(raw)
            continue
        with pytest.raises(Refused, match="levels deep"):
            parse(raw)


@given(st.text(alphabet='()[]{}"\\|*+?=:# \nab1,', max_size=200))
def test_any_grammar_is_measured(text: str) -> None:
    depth, rules, size = grammar_size(text)
    assert 0 <= depth <= text.count("(") and rules <= text.count("::=") and size >= 0


def test_a_grammar_is_measured_in_proportion_to_its_text() -> None:
    assert grammar_size('root ::= ("a"{100}){100}')[2] >= 10_000
    assert grammar_size('root ::= "((((" [((((] # ((((')[0] == 0
    began = time.perf_counter()
    grammar_size("(" * 60_000)
    grammar_size('"' + "\\" * 60_000)
    grammar_size("a{1000000000}" * 5_000)
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    ("prompt", "seats", "texts"),
    [
        ("a", 1, ["a"]),
        ([1, 2], 1, [""]),
        (["a", 3, "b"], 1, ["ab"]),
        (["a", "b"], 2, ["a", "b"]),
        ([[1], "b", {"prompt_string": "c"}], 3, ["", "b", "c"]),
    ],
)
def test_prompts_of_every_shape_are_read(prompt: Any, seats: int, texts: list[str]) -> None:
    prepared = prepare("/completion", json.dumps({"prompt": prompt}).encode(), ROWS, 512, 1000)
    assert (prepared.seats, prepared.texts) == (seats, texts)


@pytest.mark.parametrize("prompt", [[1] * 513, [1000], [-1], [True], [[]] * 65, [], 7, [{"a": 1}], [[1.5]]])
def test_prompts_that_cannot_be_are_refused(prompt: Any) -> None:
    with pytest.raises(Refused):
        prepare("/completion", json.dumps({"prompt": prompt}).encode(), ROWS, 512, 1000)


def test_only_a_text_that_may_be_too_long_is_counted() -> None:
    assert chunks_to_count("a" * 4096, 512) == []
    assert "".join(chunks_to_count("ab" * 100_000, 512)) == "ab" * 100_000
