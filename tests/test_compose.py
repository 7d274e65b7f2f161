"""docker-compose.yml says what the programs understand: its commands are read by their own parsers."""

import re
import shlex
from pathlib import Path

import yaml

from backbone.cli import parser as backbone_parser
from backbone.node.cli import parser as node_parser
from relay.cli import parser as relay_parser

COMPOSE = Path(__file__).parent.parent / "docker-compose.yml"
PARSERS = {"relay": relay_parser(), "backbone": backbone_parser({}), "expert-node": node_parser()}


def test_every_service_is_started_with_options_its_program_has() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert set(services) == {"relay", "backbone", "node"}
    for service in services.values():
        program, *arguments = shlex.split(re.sub(r"\$\{(\w+):\?\}", r"some-\1", service["command"]))
        PARSERS[program].parse_args(arguments)
