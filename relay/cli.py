"""`relay serve`, `relay status`, `relay doctor`: arguments and environment -> Config -> run."""

import argparse
import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import segno

from relay import __version__, doctor, status
from relay.config import ENVIRONMENT_PREFIX, Config, from_sources, settings
from relay.errors import ConfigError
from relay.program import values
from relay.program.running import GRACE_S, leave, run_async, run_blocking
from relay.program.text import log_to_stderr
from relay.program.values import BadValue, OneLineParser
from relay.server import STOP_S, RelayServer, lan_urls

TOKEN_FILE = "backbone-token"


def parser() -> argparse.ArgumentParser:
    """Make the command line from the table of settings."""
    top = OneLineParser(prog="relay", description="Pair nodes with backbones and carry their calls.")
    top.add_argument("--version", action="version", version=f"relay {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run a relay", description="Run a relay until interrupted.")
    examine = commands.add_parser(
        "doctor", help="say what of this machine slows or breaks a relay",
        description="Say what of this machine slows or breaks a relay with these settings, and the command "
        "that mends it. Changes nothing. The exit status is 1 if something is broken.",
    )  # fmt: skip
    look = commands.add_parser(
        "status", help="say who is at a relay, and which lane carries each node's calls",
        description="Say who is at a relay, and which lane carries each node's calls, why, known since when.",
    )  # fmt: skip
    here = f"http://127.0.0.1:{Config().port}"
    look.add_argument("url", nargs="?", type=values.url("http", "https"), default=here, metavar="URL",
                      help=f"the relay ({here})")  # fmt: skip
    look.add_argument("--json", action="store_true", help="as JSON, for programs")
    look.add_argument("--watch", nargs="?", type=values.seconds(0.2, 3600), const=2.0, metavar="SECONDS",
                      help="again and again, until Ctrl-C (every 2 s)")  # fmt: skip
    for each in settings():
        unit = f" [{each.metadata['unit']}]" if each.metadata["unit"] else ""
        default = "" if each.default is None else f"; default {each.default}"
        variable = f"{ENVIRONMENT_PREFIX}{each.name.upper()}"
        for command in (serve, examine):
            command.add_argument(
                "--" + each.name.replace("_", "-"),
                type=each.metadata["read"],
                default=argparse.SUPPRESS,
                help=f"{each.metadata['help']}{unit} ({variable}{default})",
            )
    return top


def complete(config: Config, environment: Mapping[str, str]) -> Config:
    """Fill in what depends on the user: folders, and the token kept in the state folder."""
    home = Path(environment.get("HOME", "."))
    state = Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state") / "expertswarm" / "relay"
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "expertswarm" / "slices"
    state, cache = config.state_dir or state, config.cache_dir or cache
    config = replace(config, state_dir=state, cache_dir=cache)
    if (why := values.why_not_writable(cache)) is not None:
        raise ConfigError(f"slices cannot be kept in {cache}: {why}; choose another --cache-dir")
    if config.backbone_token_file is not None:
        if config.backbone_token is not None:
            raise ConfigError("backbone_token and backbone_token_file contradict each other: give one")
        config = replace(config, backbone_token=_only_token(config.backbone_token_file))
    elif config.backbone_token is None:
        config = replace(config, backbone_token=kept_token(state / TOKEN_FILE))
    return config


def kept_token(path: Path) -> str:
    """
    Return the token in this file; make both if there is none.

    Raises:
        ConfigError: the file cannot be made or read, or holds no token.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _only_token(path)
    except OSError as exc:
        why = f"the backbone token cannot be kept in {path}: {exc.strerror}"
        raise ConfigError(f"{why}; choose another --state-dir, or give --backbone-token") from exc
    token = secrets.token_hex(16)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
    except OSError as exc:
        path.unlink(missing_ok=True)  # or the next start would find an empty one
        raise ConfigError(f"the backbone token cannot be kept in {path}: {exc.strerror}") from exc
    return token


def _only_token(path: Path) -> str:
    try:
        found = values.secrets_in(path)
    except BadValue as exc:
        raise ConfigError(f"the backbone token: {exc}, or delete the file to get a new one") from exc
    if len(found) != 1:
        raise ConfigError(f"the backbone token: {path} holds {len(found)} of them, one is needed")
    return found[0]


def announce(config: Config, port: int, out: TextIO) -> None:
    """Print what people need: the URL, as a QR code too, and the token for backbones."""
    urls = lan_urls(config, port)
    url = config.public_url or urls[0]
    print(f"relay {__version__} is up", file=out)
    for each in dict.fromkeys([url, *urls]):
        print(f"  page             {each}", file=out)
    print(f"  for a backbone   --relay {url} {_token_option(config, out)}", file=out)
    print("  on a phone       scan this, then press the button\n", file=out)
    segno.make(url, error="m", micro=False).terminal(out=out, border=2, compact=True)
    out.flush()


def _token_option(config: Config, out: TextIO) -> str:
    """Show the token to a person who looks at it, and to no log."""
    if out.isatty():
        return f"--relay-token {config.backbone_token}"
    where = config.backbone_token_file
    if where is None and config.state_dir is not None and (config.state_dir / TOKEN_FILE).exists():
        where = config.state_dir / TOKEN_FILE
    return "--relay-token …   (the one given here)" if where is None else f"--relay-token-file {where}"


async def serve(config: Config) -> int:
    """Run until cancelled, then drain."""
    async with RelayServer(config) as relay:
        announce(config, relay.port, sys.stdout)
        try:
            await asyncio.Event().wait()
        finally:
            print("relay: stopping, calls may finish", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    given = vars(parser().parse_args(argv))
    command = given.pop("command")
    if command == "status":
        return run_blocking(lambda: status.run(given["url"], sys.stdout, given["json"], given["watch"]))
    log_to_stderr(logging.INFO, "%(asctime)s %(levelname)s %(name)s: %(message)s", None)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        config = from_sources(given, os.environ)
        if command == "doctor":
            return run_blocking(lambda: doctor.run(config, sys.stdout))
        config = complete(config, os.environ)
        return run_async(lambda: serve(config), max(GRACE_S, config.drain_s + STOP_S), stopped_status=0)
    except (ConfigError, OSError) as exc:
        print(f"relay: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    leave(main())
