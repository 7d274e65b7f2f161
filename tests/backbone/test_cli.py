"""The command line: options, environment, defaults, and errors a person understands."""

import re
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from backbone.cli import config_of, main, parser
from backbone.errors import ConfigError, RelayRefused
from backbone.lanes.relayed import LaneHandlers, RelayedLane
from backbone.model.random_model import make_random_moe
from relay.config import Config as RelayConfig
from relay.server import RelayServer
from relay.wire.messages import Hello, Register
from relay.wire.tensors import Grid
from tests.fakes.peers import manifest


def config(*arguments: str, **environment: str):  # type: ignore[no-untyped-def]
    return config_of(parser(environment).parse_args(["serve", *arguments]), environment)


def test_defaults_serve_locally_on_loopback() -> None:
    made = config("--model", "m.gguf", HOME="/home/me")
    assert (made.model, made.relay, made.host, made.port) == (Path("m.gguf"), None, "127.0.0.1", 8080)
    assert made.cache_dir == Path("/home/me/.cache/expertswarm")
    assert made.api_keys == () and made.grid is Grid.X32 and not made.hedge


def test_options_win_over_the_environment_and_that_over_defaults() -> None:
    environment = {"BACKBONE_MODEL": "e.gguf", "BACKBONE_PORT": "9000", "BACKBONE_API_KEYS": "a,b"}
    made = config("--port", "9001", **environment)
    assert (made.model, made.port, made.api_keys) == (Path("e.gguf"), 9001, ("a", "b"))
    assert config("--api-key", "c", **environment).api_keys == ("c",)


def test_a_backbone_seals_with_a_key_that_is_kept_and_may_insist_or_not_at_all() -> None:
    made = config("--model", "m", HOME="/home/me")
    assert made.seal and not made.require_sealed
    assert made.key_file == Path("/home/me/.local/state/expertswarm/backbone-key.pem")
    assert config("--model", "m", "--require-sealed").require_sealed
    assert not config("--model", "m", BACKBONE_NO_SEAL="1").seal
    with pytest.raises(ConfigError, match="--no-seal contradicts --require-sealed"):
        config("--model", "m", "--require-sealed", "--no-seal")


def test_a_variable_nobody_knows_is_named_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert config("--model", "m", BACKBONE_PROT="9000").port == 8080
    assert "BACKBONE_PROT in the environment is no setting" in caplog.text


def test_what_a_container_platform_sets_for_a_service_called_backbone_means_nothing() -> None:
    environment = {
        "BACKBONE_SERVICE_HOST": "10.0.0.1",
        "BACKBONE_PORT": "tcp://10.0.0.1:8080",
        "BACKBONE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "BACKBONE_NAME": "/node/backbone",
    }
    made = config("--model", "m", **environment)
    assert (made.port, made.name) == (8080, "backbone")


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"BACKBONE_PORT": "80000"}, "BACKBONE_PORT: '80000' is no port"),
        ({"BACKBONE_API_KEY": ""}, "BACKBONE_API_KEY: an empty secret"),
        ({"BACKBONE_API_KEYS": "a,,b"}, "BACKBONE_API_KEYS: an empty secret"),
        ({"BACKBONE_API_KEYS": ""}, "BACKBONE_API_KEYS: an empty secret"),
        ({"BACKBONE_HEDGE": "maybe"}, "BACKBONE_HEDGE: 'maybe' is neither true nor false"),
        ({"BACKBONE_GRID": "x8"}, "BACKBONE_GRID: 'x8' is none of x32, x16"),
        ({"BACKBONE_RELAY": "http://x:99999"}, "BACKBONE_RELAY: 'http://x:99999' is no"),
    ],
)
def test_a_wrong_variable_is_named(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        config("--model", "m", **environment)


def test_keys_come_from_options_files_and_the_environment(tmp_path: Path) -> None:
    assert config("--model", "m", BACKBONE_API_KEY="one").api_keys == ("one",)
    assert config("--model", "m", BACKBONE_API_KEY="one", BACKBONE_API_KEYS="two,three").api_keys == (
        "one", "two", "three",
    )  # fmt: skip
    (keys := tmp_path / "keys").write_text("four\nfive\n")
    assert config("--model", "m", "--api-key-file", str(keys), "--api-key", "x").api_keys == (
        "x",
        "four",
        "five",
    )
    assert config("--model", "m", BACKBONE_API_KEY_FILE=str(keys)).api_keys == ("four", "five")
    relay = ("--model", "m", "--relay", "http://edge", "--key-file", str(tmp_path / "key.pem"))
    (token := tmp_path / "token").write_text("the-token\n")
    assert config(*relay, "--relay-token-file", str(token)).relay_token == "the-token"
    with pytest.raises(ConfigError, match="--relay needs --relay-token"):
        config(*relay)


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_true_is_true(word: str) -> None:
    made = config("--model", "m", BACKBONE_REQUIRE_SEALED=word, BACKBONE_ALLOW_INEXACT="false")
    assert made.require_sealed and not made.allow_inexact


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem, secret = folder / f"{name}.pem", folder / f"{name}.key"
    pem.write_bytes(made.public_bytes(Encoding.PEM))
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return pem, secret


def test_settings_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    pem, key = map(str, certificate(tmp_path, "one"))
    _, other = map(str, certificate(tmp_path, "two"))
    (garbage := tmp_path / "garbage").write_text("no pem")
    listen = ("--listen", "127.0.0.1:0")
    wrong = {
        ("--public-url", "ws://x"): "--public-url is of use with --listen",
        ("--tls-cert", pem): "--tls-cert is of use with --listen",
        ("--listen", "0.0.0.0:9000"): "add --public-url",
        (*listen, "--tls-key", key): "--tls-key is of use with --tls-cert",
        (*listen, "--tls-cert", str(tmp_path / "none")): "none: No such file",
        (*listen, "--tls-cert", pem, "--tls-key", str(tmp_path / "none")): "No such file",
        (*listen, "--tls-cert", str(garbage)): "garbage: no certificate",
        (*listen, "--tls-cert", pem, "--tls-key", other): "no certificate with its",
        (*listen, "--tls-cert", pem): "no certificate with its",
        (*listen, "--tls-cert", pem, "--tls-key", key, "--public-url", "ws://x"): "is not encrypted",
        ("--record", str(garbage)): "--record .*garbage: .*is a file",
        ("--cache-dir", str(garbage / "x")): "--cache-dir .*garbage/x: .*is a file",
    }
    for options, complaint in wrong.items():
        with pytest.raises(ConfigError, match=complaint):
            config("--model", "m", *options)
    assert config("--model", "m", *listen, "--tls-cert", pem, "--tls-key", key).listen is not None


def test_a_port_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_random_moe(tmp_path / "m.gguf")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        options = ["--model", str(model), "--cache-dir", str(tmp_path), "--port", str(port)]
        assert main(["serve", *options]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"backbone: cannot listen on 127.0.0.1:{port} (API): the port is in use")


async def test_a_wrong_token_ends_the_backbone_and_is_called_wrong(tmp_path: Path) -> None:
    async with RelayServer(RelayConfig(host="127.0.0.1", port=0, backbone_token="the-right-one")) as relay:
        lane = RelayedLane(
            relay.url,
            Hello("backbone", "a" * 32, "b" * 32, "a-wrong-one", "test"),
            Register("b", manifest()),
            LaneHandlers(lambda _: None, lambda _: None, lambda _: None, lambda _: None),
        )
        with pytest.raises(RelayRefused, match="wrong backbone token.*--relay-token"):
            await lane.run()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--model"),
        (("--model", "m", "--relay", "ws://edge"), "'ws://edge' is no http or https URL"),
        (("--model", "m", "--port", "many"), "'many' is no port"),
        (("--model", "m", "--port", "80000"), "'80000' is no port"),
        (("--model", "m", "--threads", "-3"), "'-3' is no number of threads"),
        (("--model", "m", "--threads", "5000"), "'5000' is no number of threads"),
        (("--model", "m", "--parallel", "0"), "'0' is no number from 1"),
        (("--model", "m", "--parallel", "-1"), "'-1' is no number from 1"),
        (("--model", "m", "--context", "1"), "'1' is no number of tokens from 32"),
        (("--model", "m", "--context", "1000000000"), "is no number of tokens"),
        (("--model", "m", "--local-cache", "5"), "'5' is too small"),
        (("--model", "m", "--local-cache", "900TB"), "of memory there are here"),
        (("--model", "m", "--api-key", ""), "an empty secret"),
        (("--model", "m", "--name", ""), "0 characters"),
        (("--model", "m", "--name", "a\x1b[2J"), "cannot be shown"),
        (("--model", "m", "--host", "http://x"), "is no address to listen on"),
        (("--model", "m", "--listen", "x:99999"), "is no HOST:PORT"),
        (("--model", "m", "--relay-token-file", "/nowhere"), "/nowhere: No such file"),
        (("--model", "m", "--speculate", "magic"), "invalid choice: 'magic'"),
        (("--model", "m", "--local-cache", "lots"), "'lots' is no size"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        config(*arguments)
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_a_file_that_is_no_model_ends_with_its_name_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "letter.gguf"
    path.write_text("Dear swarm")
    assert main(["serve", "--model", str(path), "--port", "0", "--cache-dir", str(tmp_path)]) == 1
    assert "letter.gguf" in capsys.readouterr().err
    assert main(["serve", "--model", str(tmp_path / "none.gguf"), "--port", "0"]) == 1
    assert "none.gguf" in capsys.readouterr().err
