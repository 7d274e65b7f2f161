"""The one line of a log that says why the engine ended."""

import pytest

from backbone.engine.reason import MAX_CHARS, reason

BACKTRACE = [
    "[New LWP 4242]",
    "[Thread debugging using libthread_db enabled]",
    'Using host libthread_db library "/lib/x86_64-linux-gnu/libthread_db.so.1".',
    "0x00007f3d2b4d7c6a in wait4 () from /lib/x86_64-linux-gnu/libc.so.6",
    "#0  0x00007f3d2b4d7c6a in wait4 () from /lib/x86_64-linux-gnu/libc.so.6",
    "#1  0x00007f3cc0a8 in ggml_print_backtrace () from /venv/xllamacpp.abi3.so",
    "/venv/xllamacpp.abi3.so(+0x52f8a3) [0x7f3cc0a8]",
    "/venv/xllamacpp.abi3.so(ggml_abort+0x152) [0x7f3cc0a8]",
    "[Inferior 1 (process 4240) detached]",
]


@pytest.mark.parametrize(
    "why",
    [
        "/src/ggml/src/ggml.c:1234: GGML_ASSERT(ne[0] % 32 == 0) failed",
        "/src/llama-context.cpp:77: fatal error",
        "  what():  std::bad_alloc",
        "Fatal Python error: Segmentation fault",
    ],
)
def test_the_reason_is_found_before_a_backtrace_of_any_length(why: str) -> None:
    log = ["W srv load_model: warming up", why, *BACKTRACE * 10]
    assert reason(log) == why.strip()


def test_the_cause_of_a_failed_load_is_no_follow_up() -> None:
    log = [
        "0.00.123.456 E llama_model_load: error loading model: tensor 'blk.0' is not within the file",
        "0.00.123.789 E srv  load_model: failed to load model, '/m.gguf'",
    ]
    assert reason(log) == "E llama_model_load: error loading model: tensor 'blk.0' is not within the file"


def test_a_log_without_a_telling_line_gives_its_last_one() -> None:
    assert reason(["one", "two", "", *BACKTRACE]) == "two"
    assert reason(BACKTRACE) == reason([]) == ""


def test_the_reason_is_one_short_printable_line() -> None:
    said = reason(["GGML_ASSERT(\x1b[31m" + "x" * 5000])
    assert len(said) == MAX_CHARS and said.isprintable()
