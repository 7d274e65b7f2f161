"""`relay serve`: settings from arguments and environment, the token, what it prints, how it stops."""

import io
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from relay import __version__, cli
from relay.config import Config, from_sources
from relay.errors import ConfigError

ROOT = Path(__file__).parents[2]


def parse(*arguments: str, environment: dict[str, str] | None = None) -> Config:
    given = vars(cli.parser().parse_args(["serve", *arguments]))
    given.pop("command")
    return from_sources(given, environment or {})


def test_command_line_goes_before_environment_goes_before_default() -> None:
    environment = {"RELAY_PORT": "1", "RELAY_CACHE_BYTES": "5", "PATH": "/bin"}
    config = parse("--port", "2", "--backpressure-s", "0.5", environment=environment)
    assert (config.port, config.cache_bytes, config.backpressure_s) == (2, 5, 0.5)
    assert config.host == Config().host


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RELAY_PROT": "1"}, "unknown environment variable RELAY_PROT"),
        ({"RELAY_PORT": "many"}, "RELAY_PORT: 'many' is no int"),
        ({"RELAY_PORT": "70000"}, "port: 70000"),
        ({"RELAY_STALL_S": "-1"}, "stall_s: -1.0 is negative"),
        ({"RELAY_BACKBONE_TOKEN": "short"}, "backbone_token"),
        ({"RELAY_PUBLIC_URL": "ftp://x"}, "public_url: 'ftp://x'"),
        ({"RELAY_PING_INTERVAL_S": "0"}, "ping_interval_s"),
    ],
)
def test_wrong_setting_is_named_with_the_value_found(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(environment=environment)


def test_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting: colour"):
        from_sources({"colour": "red"}, {})


def test_token_is_made_once_and_kept_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "backbone-token"
    token = cli.kept_token(path)
    assert len(token) == 32 and cli.kept_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_folders_follow_the_user_and_a_given_token_is_not_stored(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "c")}
    config = cli.complete(Config(backbone_token="given-token"), environment)
    assert config.cache_dir == tmp_path / "c" / "expertswarm" / "slices"
    assert config.backbone_token == "given-token" and not (tmp_path / ".local").exists()
    made = cli.complete(Config(), environment)
    assert (
        made.backbone_token
        == (tmp_path / ".local/state/expertswarm/relay/backbone-token").read_text().strip()
    )


def test_announcement_has_url_token_and_qr_code() -> None:
    out = io.StringIO()
    cli.announce(Config(public_url="https://swarm.example", backbone_token="the-token"), 8765, out)
    text = out.getvalue()
    assert "https://swarm.example" in text and "--relay-token the-token" in text and "█" in text


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"relay {__version__}\n"


def test_help_names_every_setting_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "--queue-bytes" in shown and "RELAY_QUEUE_BYTES" in shown


def test_relay_serve_starts_says_so_and_stops_on_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relay.cli", "serve", "--host", "127.0.0.1", "--port", "0"]
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    errors = process.communicate(timeout=20)[1]
    assert first == f"relay {__version__} is up\n", errors
    assert "http://127.0.0.1:" in rest and rest.endswith("relay: stopping, calls may finish\n")
    assert process.returncode == 0, errors


def test_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    import socket

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        command = [sys.executable, "-m", "relay.cli", "serve", "--host", "127.0.0.1", "--port", port]
        environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("relay: ") and "in use" in done.stderr
