"""The command line: options, environment, defaults, and errors a person understands."""

from pathlib import Path

import pytest

from backbone.cli import config_of, main, parser
from backbone.errors import ConfigError
from relay.wire.tensors import Grid


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


def test_an_unknown_variable_is_a_typing_error() -> None:
    with pytest.raises(ConfigError, match="BACKBONE_PROT"):
        config("--model", "m", BACKBONE_PROT="9000")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--model"),
        (("--model", "m", "--relay", "ws://edge"), "must be http://… or https://…, not 'ws://edge'"),
        (("--model", "m", "--port", "many"), "invalid int value: 'many'"),
        (("--model", "m", "--speculate", "magic"), "invalid choice: 'magic'"),
        (("--model", "m", "--local-cache", "lots"), "'lots' is no size"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        config(*arguments)
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_no_model_ends_with_its_name_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "letter.gguf"
    path.write_text("Dear swarm")
    assert main(["serve", "--model", str(path), "--port", "0", "--cache-dir", str(tmp_path)]) == 1
    assert "letter.gguf" in capsys.readouterr().err
    assert main(["serve", "--model", str(tmp_path / "none.gguf"), "--port", "0"]) == 1
    assert "none.gguf" in capsys.readouterr().err
