"""
How deep and how large a text of JSON, a grammar or a pattern is, before anything recursive reads it. Pure.

No function here recurses; each takes time in proportion to its text.
"""

import re

import numpy as np

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1

# One token of GBNF: literal, class, comment, repetition, group, rule, name; what else there is, is free.
_GBNF = re.compile(
    r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\n]*|'
    r"\{\s*(?P<least>\d*)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\}|(?P<open>\()|(?P<close>\))|"
    r"(?P<rule>::=)|[\w.-]+|(?P<many>[*+?])",
    re.DOTALL,
)


def json_depth(body: bytes) -> int:
    """Count how deep arrays and objects stand in each other; brackets inside strings do not count."""
    rest = np.frombuffer(_STRING.sub(b"", body), np.uint8)
    return int(np.cumsum(_STEPS[rest], dtype=np.int64).max(initial=0))


def grammar_size(text: str) -> tuple[int, int, int]:
    """
    Measure a grammar (GBNF) or a pattern: nesting of groups, rules, and elements once repetitions are
    written out, as llama.cpp does: ("a"{100}){100} counts 10,000.
    """
    depth, rules = 0, 0
    sizes = [0]  # elements of the groups we are in
    last = 0  # size of the element before a repetition
    deepest = 0
    for token in _GBNF.finditer(text):
        if token["rule"]:
            rules += 1
        elif token["open"]:
            sizes.append(0)
            depth += 1
            deepest = max(deepest, depth)
        elif token["close"]:
            if depth:
                depth -= 1
                last = max(1, sizes.pop())
                sizes[-1] += last
        elif token["least"] is not None:
            times = max(_number(token["least"]), _number(token["most"]), 1)
            sizes[-1] += last * (times - 1)
            last *= times
        elif not token["many"] and not token[0].startswith("#"):
            last = 1
            sizes[-1] += 1
        if sizes[-1] > 1 << 40:
            break
    return deepest, rules, sum(sizes)


def optional_elements(text: str) -> int:
    """Count the elements of a grammar that may be left out or repeated at will."""
    return sum(1 for token in _GBNF.finditer(text) if token["many"] in ("?", "*") or token["least"] == "0")


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 10 and digits else (1 << 30 if digits else 0)
