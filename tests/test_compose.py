"""
docker-compose.yml says what the programs understand: commands and variables are read by their own parsers.

It cannot be brought up where these tests run; what can be checked without Docker is.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from backbone.cli import config_of
from backbone.cli import parser as backbone_parser
from backbone.node.cli import parser as node_parser
from relay.cli import parser as relay_parser
from relay.config import from_sources

ROOT = Path(__file__).parent.parent
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def filled_in(text: str) -> str:
    """Give variables their default, or a value."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return re.sub(r"\$\{(\w+):\?\}", r"some-\1", text)


def command(service: str) -> tuple[list[str], dict[str, str]]:
    described = SERVICES[service]
    environment = {name: filled_in(value) for name, value in described.get("environment", {}).items()}
    return shlex.split(filled_in(described["command"])), environment


def test_the_relay_understands_its_options_and_variables() -> None:
    (program, *arguments), environment = command("relay")
    given = vars(relay_parser().parse_args(arguments))
    assert program == "relay" and given.pop("command") == "serve"
    config = from_sources(given, environment)
    assert (config.backbone_token, config.public_url) == ("some-TOKEN", "http://localhost:8765")


def test_the_backbone_understands_its_options_and_variables(tmp_path: Path) -> None:
    (program, *arguments), environment = command("backbone")
    environment |= {"XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    config = config_of(backbone_parser(environment).parse_args(arguments), environment)
    assert (program, config.relay_token, config.api_keys) == ("backbone", "some-TOKEN", ("some-API_KEY",))


def test_the_node_understands_its_options() -> None:
    (program, *arguments), environment = command("node")
    assert program == "expert-node" and environment == {}
    node_parser().parse_args(arguments)


@pytest.mark.parametrize("service", ["relay", "backbone"])
def test_keys_outlive_the_container_and_no_secret_stands_on_a_command_line(service: str) -> None:
    assert f"{service}-state:/state" in SERVICES[service]["volumes"]
    assert "XDG_STATE_HOME=/state" in DOCKERFILE
    assert "TOKEN" not in SERVICES[service]["command"] and "KEY" not in SERVICES[service]["command"]


@pytest.mark.parametrize(("service", "path"), [("relay", "8765/healthz"), ("backbone", "8080/health")])
def test_health_is_asked_where_it_is_answered(service: str, path: str) -> None:
    words = SERVICES[service]["healthcheck"]["test"]
    assert words[:3] == ["CMD", "python", "-c"] and f"http://127.0.0.1:{path}'" in words[3]
    compile(words[3], "healthcheck", "exec")
    assert {service_["stop_grace_period"] for service_ in SERVICES.values()} == {"5s"}, "they take two"
