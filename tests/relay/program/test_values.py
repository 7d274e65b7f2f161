"""What people type becomes a value or one line that says what was wanted; nothing else."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.program import values
from relay.program.environment import of_environment, readers_of
from relay.program.values import BadValue

READERS: dict[str, Callable[[str], object]] = {
    "port": values.port,
    "whole": values.whole(1, 10),
    "threads": values.threads,
    "seconds": values.seconds(0.1, 100),
    "size": values.size(1000, 1 << 40),
    "memory": values.memory(1),
    "flag": values.flag,
    "line": values.line(1, 40),
    "secret": values.secret(8),
    "secrets": values.secrets,
    "host": values.host,
    "host_and_port": values.host_and_port,
    "url": values.url("http", "https"),
    "path": values.path,
    "present_file": values.present_file,
    "present_folder": values.present_folder,
}


@given(
    st.sampled_from(sorted(READERS)),
    st.text() | st.from_regex(r"[a-z]{2,5}://.*") | st.from_regex(r"-?\d+.*"),
)
def test_any_text_gives_a_value_or_bad_value(name: str, text: str) -> None:
    try:
        READERS[name](text)
    except BadValue as exc:
        assert str(exc) and "\n" not in str(exc).replace(text, "")


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("port", ["-1", "65536", "80000", "", "eighty", "8.0", "１", "0x50", "tcp://10.0.0.1:8765"]),
        ("whole", ["0", "11", "-3", "1e3", "nan", "", "9" * 400]),
        ("threads", ["0", "-3", "500", "99999"]),
        ("seconds", ["nan", "inf", "-inf", "-1", "1e400", "soon", "0", "101"]),
        ("size", ["", "lots", "-5MB", "5XB", "999", "5", "1e9", "99999TB", "infGB"]),
        ("memory", ["900TB"]),
        ("flag", ["maybe", "2", "truee"]),
        ("line", ["", "x" * 41, "a\x1b[31mb", "a\nb", "a\u202eb"]),
        ("secret", ["", "short", "with blanks in it", "caf\xe9-caf\xe9", "x" * 201]),
        ("secrets", ["", ",", "a,", "a,,b"]),
        ("host", ["", "http://x", "a b", "x/y"]),
        ("host_and_port", ["x", ":9000", "x:", "x:99999", "a b:1"]),
        ("url", ["relay.example", "ws://x", "http://", "http://x:99999", "http://x:", "http://[::1",
                 "http://a b", "http://u:p@x", "http://x?q=1", "http://x:0", "http://\x00"]),
        ("path", ["", "a\0b", "~nobody-of-that-name/x", "x" * 300]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(name: str, bad: list[str]) -> None:
    for text in bad:
        with pytest.raises(BadValue):
            READERS[name](text)


def test_what_people_mean_is_read() -> None:
    assert values.port("0") == 0 and values.port("65535") == 65535
    assert [values.flag(t) for t in ("1", "true", "YES", "on", "0", "false", "No", "off", "")] == [
        True, True, True, True, False, False, False, False, False,
    ]  # fmt: skip
    assert values.size()("1.5 gb") == 1_500_000_000 and values.size()("2GiB") == 2 << 30
    assert values.host_and_port("[::1]:9000") == ("::1", 9000)
    assert values.url("http")("http://[::1]:80/x/#frag") == "http://[::1]:80/x"
    assert values.secrets("a, b") == ("a", "b")


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(BadValue) as caught:
        values.secret(8, 20)("my secret with blanks")
    assert "my secret" not in str(caught.value)


def test_secrets_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one-key\n\n  two-key  \n")
    assert values.secrets_in(path) == ("one-key", "two-key")
    for content in (b"", b"\n \n", b"a b\n", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(BadValue, match="keys"):
            values.secrets_in(path)
    with pytest.raises(BadValue, match="cannot be read"):
        values.secrets_in(tmp_path / "none")


def test_a_flag_and_its_variable_mean_the_same() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=values.port)
    parser.add_argument("--hedge", action="store_true")
    parser.add_argument("--grid", choices=["x32", "x16"])
    readers = readers_of(parser)
    read = lambda **env: of_environment("P_", readers, env)[0]  # noqa: E731
    assert read(P_PORT="80", P_HEDGE="yes", P_GRID="x16") == {"port": 80, "hedge": True, "grid": "x16"}
    assert read(P_HEDGE="false") == {"hedge": False}
    for wrong in ({"P_PORT": "x"}, {"P_HEDGE": "maybe"}, {"P_GRID": "x64"}):
        with pytest.raises(BadValue, match=next(iter(wrong))):
            read(**wrong)
