"""`relay serve`: settings from arguments and environment, the token, what it prints, how it stops."""

import io
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from relay import __version__, cli
from relay.config import Config, from_sources
from relay.errors import ConfigError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROOT = Path(__file__).parents[2]


def parse(*arguments: str, environment: dict[str, str] | None = None) -> Config:
    given = vars(cli.parser().parse_args(["serve", *arguments]))
    given.pop("command")
    return from_sources(given, environment or {})


def test_command_line_goes_before_environment_goes_before_default() -> None:
    environment = {"RELAY_PORT": "1", "RELAY_CACHE_BYTES": "5MB", "PATH": "/bin"}
    config = parse("--port", "2", "--backpressure-s", "0.5", environment=environment)
    assert (config.port, config.cache_bytes, config.backpressure_s) == (2, 5_000_000, 0.5)
    assert config.host == Config().host


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RELAY_PORT": "many"}, "RELAY_PORT: 'many' is no port"),
        ({"RELAY_PORT": "70000"}, "RELAY_PORT: '70000' is no port"),
        ({"RELAY_PORT": "-1"}, "RELAY_PORT: '-1' is no port"),
        ({"RELAY_STALL_S": "-1"}, "RELAY_STALL_S: '-1' is no number of seconds"),
        ({"RELAY_STALL_S": "nan"}, "RELAY_STALL_S: 'nan' is no number of seconds"),
        ({"RELAY_DRAIN_S": "inf"}, "RELAY_DRAIN_S: 'inf' is no number of seconds"),
        ({"RELAY_MAX_SESSIONS": "0"}, "RELAY_MAX_SESSIONS: '0' is no number from 1"),
        ({"RELAY_CACHE_BYTES": "5"}, "RELAY_CACHE_BYTES: '5' is too small"),
        ({"RELAY_BACKBONE_TOKEN": "short"}, "RELAY_BACKBONE_TOKEN: a secret of 8 to 200"),
        ({"RELAY_BACKBONE_TOKEN": ""}, "RELAY_BACKBONE_TOKEN: an empty secret"),
        ({"RELAY_PUBLIC_URL": "ftp://x"}, "RELAY_PUBLIC_URL: 'ftp://x' is no https or http URL"),
        ({"RELAY_PUBLIC_URL": "http://x:99999"}, "RELAY_PUBLIC_URL: 'http://x:99999' is no"),
        ({"RELAY_PUBLIC_URL": "http://[::1"}, "RELAY_PUBLIC_URL: "),
        ({"RELAY_HOST": "http://x"}, "RELAY_HOST: 'http://x' is no address"),
        ({"RELAY_PYODIDE_DIR": "/nowhere"}, "RELAY_PYODIDE_DIR: /nowhere: there is no such folder"),
        ({"RELAY_PING_INTERVAL_S": "0"}, "RELAY_PING_INTERVAL_S: '0'"),
    ],
)
def test_wrong_setting_is_named_with_the_value_found(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(environment=environment)


def test_what_a_container_platform_sets_for_a_service_called_relay_means_nothing() -> None:
    kubernetes = {
        "RELAY_SERVICE_HOST": "10.0.0.1",
        "RELAY_SERVICE_PORT": "8765",
        "RELAY_SERVICE_PORT_HTTP": "8765",
        "RELAY_PORT": "tcp://10.0.0.1:8765",
        "RELAY_PORT_8765_TCP": "tcp://10.0.0.1:8765",
        "RELAY_PORT_8765_TCP_PROTO": "tcp",
        "RELAY_PORT_8765_TCP_PORT": "8765",
        "RELAY_PORT_3478_UDP_ADDR": "10.0.0.1",
        "RELAY_EU_WEST_PORT": "tcp://10.0.0.2:8765",
        "RELAY_NAME": "/node/relay",
        "RELAY_ENV_HOME": "/root",
    }
    assert parse(environment=kubernetes) == Config()


def test_a_variable_nobody_knows_is_named_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert parse(environment={"RELAY_PROT": "1"}) == Config()
    assert "RELAY_PROT in the environment is no setting" in caplog.text and "RELAY_PORT?" in caplog.text


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
    config = Config(public_url="https://swarm.example", backbone_token="the-token")
    cli.announce(config, 8765, out := Terminal())
    text = out.getvalue()
    assert "https://swarm.example" in text and "--relay-token the-token" in text and "█" in text


def test_the_token_goes_to_no_log(tmp_path: Path) -> None:
    cli.announce(Config(backbone_token="the-token"), 8765, out := io.StringIO())
    assert "the-token" not in out.getvalue()
    kept = cli.complete(Config(state_dir=tmp_path, cache_dir=tmp_path), {})
    cli.announce(kept, 8765, out := io.StringIO())
    assert f"--relay-token-file {tmp_path / cli.TOKEN_FILE}" in out.getvalue()
    assert kept.backbone_token is not None and kept.backbone_token not in out.getvalue()


@pytest.mark.parametrize("content", [b"", b"\n", b"two\ntokens-here\n", b"caf\xc3\xa9-caf\xc3\xa9\n"])
def test_a_file_that_holds_no_token_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / cli.TOKEN_FILE
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        cli.complete(Config(state_dir=tmp_path, cache_dir=tmp_path), {})
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        cli.complete(Config(backbone_token_file=path, cache_dir=tmp_path), {})


@pytest.mark.parametrize("option", ["state_dir", "cache_dir"])
def test_a_folder_that_cannot_be_is_named(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    folders = {"state_dir": tmp_path, "cache_dir": tmp_path} | {option: tmp_path / "file" / "below"}
    with pytest.raises(ConfigError, match="file/below.*--" + option.replace("_", "-")):
        cli.complete(Config(**folders), {})


def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--port", "80000"], ["--max-sessions", "0"], ["--stall-s", "inf"], ["--nonsense"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["serve", *options])
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "--help" in said, said


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
