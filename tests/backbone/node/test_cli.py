"""`expert-node`: what it reads from its command line and what it prints."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from backbone.node.cli import line, main, parser, seal_policy, spans
from backbone.node.client import ClientConfig, Status
from backbone.node.machine import State
from relay.wire import messages
from relay.wire.sealing import SealPolicy
from tests.fakes.model import RandomModel
from tests.fakes.relay import FakeRelay

CONFIG = ClientConfig("http://relay:8000", 10**8, "box")
STATUS = Status(
    State.SERVING, "", "native-avx2", 12.3, (0, 1, 2, 5), 24, 24, 33_000_000, 1200, 3600, 0, 88.0,
    5_000_000, 9_000_000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--relay", "nonsense"), "is no http or https URL"),
        (("--relay", "http://x:99999"), "is no http or https URL"),
        (("--memory", "lots"), "is no size"),
        (("--memory", "5"), "is too small"),
        (("--memory", "900TB"), "of memory there are here"),
        (("--threads", "0"), "is no number of threads"),
        (("--threads", "5000"), "is no number of threads"),
        (("--backbone-key", "12ab"), "is no fingerprint"),
        (("--public-url", "ftp://x", "--listen", "127.0.0.1:0"), "is no ws or wss"),
        (("--kernel", "magic"), "invalid choice"),
    ],
)
def test_a_wrong_option_is_one_line(
    options: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--relay", "http://edge", *options])
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_settings_that_need_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--relay", "http://edge", "--public-url", "ws://x"]) == 1
    assert "--public-url is of use with --listen" in capsys.readouterr().err


def test_defaults_are_modest() -> None:
    args = parser().parse_args(["--relay", "http://relay"])
    assert args.memory == 512_000_000
    assert 1 <= args.threads <= max(1, (os.cpu_count() or 1) - 1)


def test_one_line_says_it_all() -> None:
    text = line(CONFIG, STATUS)
    assert text.startswith("serving    http://relay:8000 · native-avx2 12.3 GB/s")
    assert "layers 0-2,5, 24 experts, 33 MB" in text
    assert "1200 calls, 3600 rows, 88 rows/s" in text


def test_layers_are_written_as_spans() -> None:
    assert [spans(n) for n in ((), (3,), (0, 1, 2, 5), (1, 3, 4))] == ["none", "3", "0-2,5", "1,3-4"]


async def test_sigterm_ends_the_process_with_bye_and_status_0(tmp_path: Path) -> None:
    model = RandomModel.make()
    async with FakeRelay(model.by_id) as relay:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "backbone.node.cli", "--relay", relay.url, "--name", "box",
            "--threads", "1", "--cache-dir", str(tmp_path), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            offer = await relay.hear(messages.Offer)
            assert (offer.name, offer.memory_bytes) == ("box", 512_000_000)
            await relay.say(lambda session: session.send_assign(model.assign({0: [0, 1]})))
            assert process.stdout is not None
            async with asyncio.timeout(10):
                while "layers 0, 2 experts" not in (await process.stdout.readline()).decode():
                    pass
            process.send_signal(signal.SIGTERM)
            out, _ = await asyncio.wait_for(process.communicate(), 10)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0
        assert out.decode().splitlines()[-1] == "expert-node: left"


def policy(*options: str) -> SealPolicy:
    return seal_policy(parser().parse_args(["--relay", "http://edge", *options]))


def test_node_seals_as_itself_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = policy()
    assert first.identity is not None and (first.required, first.backbone) == (False, None)
    again = policy("--require-sealed", "--backbone-key", "12ab-34cd-56ef-7890-1234")
    assert again.identity is not None and again.identity.public == first.identity.public
    assert (again.required, again.backbone) == (True, "12ab-34cd-56ef-7890-1234")
    other = policy("--key-file", str(tmp_path / "other.pem")).identity
    assert other is not None and other.public != first.identity.public
    assert policy("--no-seal") == SealPolicy()


def test_node_without_a_folder_for_its_key_has_another_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "expertswarm").write_text("not a folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    one, two = policy().identity, policy().identity
    assert one is not None and two is not None and one.public != two.public


@pytest.mark.parametrize(
    "options",
    [("--require-sealed",), ("--backbone-key", "12ab-34cd-56ef-7890-1234")],
    ids=["required", "pinned"],
)
def test_options_that_contradict_each_other_are_refused(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--relay", "http://edge", "--no-seal", *options]) == 1
    assert "--no-seal contradicts" in capsys.readouterr().err


def test_line_says_whether_the_relay_can_read() -> None:
    sealed = replace(STATUS, seal="sealed", backbone="12ab-34cd-56ef-7890-1234")
    assert "sealed, backbone 12ab-34cd-56ef-7890-1234" in line(CONFIG, sealed)
    bare = replace(STATUS, seal="unsealed", seal_why="the backbone does not seal")
    assert "unsealed: the backbone does not seal" in line(CONFIG, bare)
