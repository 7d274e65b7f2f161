"""
Read settings from the environment: ours are typed, those that container platforms set are left alone.
"""

import argparse
import difflib
import re
from collections.abc import Mapping
from typing import Any

from relay.program.values import BadValue, Reader, flag

# What Kubernetes (`enableServiceLinks`) and Docker (links) put into every container beside a service called
# relay, relay-eu or backbone: RELAY_SERVICE_HOST, RELAY_PORT=tcp://10.0.0.1:8765, RELAY_PORT_8765_TCP_ADDR …
_PLATFORM_NAME = re.compile(
    r"(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT(_START|_END)?|ADDR))?|_ENV_\w+)$"
)
_PLATFORM_VALUE = re.compile(r"(tcp|udp|sctp)://[^/]+:\d+|/[^/]+/[^/]+", re.ASCII)


def is_of_platform(variable: str, text: str) -> bool:
    """Tell whether a container platform, and no person, set this variable."""
    if variable.endswith(("_PORT", "_NAME")) and _PLATFORM_VALUE.fullmatch(text):
        return True
    return _PLATFORM_NAME.search(variable) is not None


def of_environment(
    prefix: str, readers: Mapping[str, Reader[Any]], environment: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """
    Read the settings that the environment gives, by name; and say which variables mean nothing here.

    Raises:
        BadValue: a variable of ours holds what it cannot; named.
    """
    values: dict[str, Any] = {}
    strange = []
    for variable, text in environment.items():
        if not variable.startswith(prefix) or is_of_platform(variable, text):
            continue
        name = variable.removeprefix(prefix).lower()
        if name not in readers or variable != prefix + name.upper():
            near = difflib.get_close_matches(variable, [prefix + each.upper() for each in readers], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            strange.append(f"{variable} in the environment is no setting and is ignored{hint}")
            continue
        try:
            values[name] = readers[name](text)
        except ValueError as exc:
            raise BadValue(f"{variable}: {exc}") from exc
    return values, strange


def readers_of(parser: argparse.ArgumentParser) -> dict[str, Reader[Any]]:
    """Give the reader of each option of a command line, by the name its variable has."""
    readers: dict[str, Reader[Any]] = {}
    for action in parser._actions:
        if not action.option_strings or action.dest == "help":
            continue
        if action.nargs == 0:
            readers[action.dest] = flag
        elif action.choices is not None:
            readers[action.dest] = _one_of(tuple(action.choices))
        else:
            assert callable(action.type) or action.type is None
            readers[action.dest] = action.type or str
    return readers


def _one_of(choices: tuple[str, ...]) -> Reader[str]:
    def read(text: str) -> str:
        if text not in choices:
            raise BadValue(f"{text[:60]!r} is none of {', '.join(choices)}")
        return text

    return read
