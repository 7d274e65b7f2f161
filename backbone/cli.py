"""`backbone serve`: arguments and environment -> Config -> run. `backbone doctor`, `backbone demo-model`."""

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from backbone import doctor
from backbone.config import Config, default_cache_dir
from backbone.errors import BackboneError, ConfigError
from backbone.experts.standing import Offload
from backbone.lanes.direct import ListenAt
from backbone.model.demo_model import ensure_demo_model
from backbone.model.moe_from_dense import KINDS
from backbone.node.keys import default_key_file, kept_identity
from backbone.server import Backbone
from relay import __version__
from relay.program import values
from relay.program.environment import of_environment, readers_of
from relay.program.running import leave, run_async, run_blocking
from relay.program.text import clean, log_to_stderr
from relay.program.values import BadValue, OneLineParser
from relay.wire.messages import NAME_CHARS
from relay.wire.tensors import Grid

log = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "BACKBONE_"


def parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """
    The command line; an option left out takes BACKBONE_<OPTION> from the environment, then its default.

    Raises:
        ConfigError: a variable holds what its option cannot; named.
    """
    top = OneLineParser(
        prog="backbone", description="Serve a Mixture-of-Experts model whose experts a swarm computes."
    )
    top.add_argument("--version", action="version", version=f"backbone {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve a model; OpenAI-compatible")
    model = serve.add_argument("--model", type=values.path, required=True, metavar="GGUF")
    _add_swarm_options(serve)
    _add_door_options(serve)
    _add_engine_options(serve)
    serve.add_argument("--verbose", action="store_true", help="say more")
    examine = commands.add_parser("doctor", help="say what of this machine slows or breaks a backbone")
    examine.add_argument("--relay", type=values.url("http", "https"), metavar="URL",
                         help="look at this relay, too, and at the way to it")  # fmt: skip
    examine.add_argument("--model", type=values.path, metavar="GGUF", help="is there memory for it?")
    demo = commands.add_parser("demo-model", help="make the demo model and print its path")
    demo.add_argument("--experts", type=values.whole(1, 4096), default=8)
    demo.add_argument("--kind", choices=list(KINDS), default="q8_0")
    demo.add_argument("--cache-dir", type=values.path, default=None, metavar="DIR")

    readers = readers_of(serve) | {"api_keys": values.secrets}
    try:
        found, strange = of_environment(ENVIRONMENT_PREFIX, readers, environment)
    except BadValue as exc:
        raise ConfigError(str(exc)) from exc
    for each in strange:
        log.warning("%s", each)
    keys = [found.pop("api_key")] if "api_key" in found else []
    serve.set_defaults(env_keys=(*keys, *found.pop("api_keys", ())))
    model.required = "model" not in found
    serve.set_defaults(**found)
    examine.set_defaults(**{name: found[name] for name in ("relay", "model") if name in found})
    return top


def _add_swarm_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--relay", type=values.url("http", "https"), metavar="URL",
                       help="the relay to join; without one all experts are computed here")  # fmt: skip
    serve.add_argument("--relay-token", type=values.secret(), metavar="TOKEN",
                       help="what `relay serve` printed for backbones")  # fmt: skip
    serve.add_argument("--relay-token-file", type=values.present_file, metavar="FILE",
                       help="a file with that token, so that it does not stand in `ps`")  # fmt: skip
    serve.add_argument("--name", type=values.line(1, NAME_CHARS), default="backbone",
                       help="how nodes see this backbone")  # fmt: skip
    serve.add_argument("--listen", type=values.host_and_port, metavar="HOST:PORT",
                       help="let nodes reach this backbone directly")  # fmt: skip
    serve.add_argument("--public-url", type=values.url("ws", "wss", "http", "https"), metavar="URL",
                       help="how nodes reach --listen (ws://HOST:PORT)")  # fmt: skip
    serve.add_argument("--tls-cert", type=values.path, metavar="PEM",
                       help="certificate of --listen; headless nodes pin it")  # fmt: skip
    serve.add_argument("--tls-key", type=values.path, metavar="PEM")
    serve.add_argument("--dial", choices=("proved", "any"), default="proved",
                       help="where nodes that listen are dialled: where the relay saw them")  # fmt: skip
    serve.add_argument("--no-links", action="store_true", help="let all calls go through the relay")
    serve.add_argument("--require-sealed", action="store_true",
                       help="do not ask nodes whose frames the relay could read")  # fmt: skip
    serve.add_argument("--no-seal", action="store_true",
                       help="let the relay read what passes between nodes and this backbone")  # fmt: skip
    serve.add_argument("--key-file", type=values.path, metavar="PEM",
                       help="this backbone's key, made at the first start (XDG state folder)")  # fmt: skip
    serve.add_argument("--offload", choices=[each.value for each in Offload], default=Offload.AUTO.value,
                       help="what nodes get: what comes back within 5 ms of this machine's own (auto), "
                            "what comes back sooner (soonest), all they carry (always)")  # fmt: skip
    serve.add_argument("--hedge", action="store_true",
                       help="ask a second holder when the first is late by its own measure")  # fmt: skip
    serve.add_argument("--allow-inexact", action="store_true",
                       help="also ask nodes with a kernel that is not exact (webgpu)")  # fmt: skip
    serve.add_argument("--record", type=values.path, metavar="FOLDER",
                       help="keep the first answer of each node, for the relay's page /verify")  # fmt: skip


def _add_door_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--host", type=values.host, default="127.0.0.1",
                       help="address of the public port (127.0.0.1)")  # fmt: skip
    serve.add_argument("--port", type=values.port, default=8080, help="public port; 0: any free one (8080)")
    serve.add_argument("--api-key", action="append", type=values.secret(), metavar="KEY",
                       help="who may ask, repeatable; none: everybody who reaches the port")  # fmt: skip
    serve.add_argument("--api-key-file", type=values.present_file, metavar="FILE",
                       help="a file with such keys, one a line: not seen in `ps`")  # fmt: skip


def _add_engine_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--context", type=values.whole(32, 1 << 22, "number of tokens"), default=4096,
                       help="tokens per slot (4096)")  # fmt: skip
    serve.add_argument("--parallel", type=values.whole(1, 256), default=1, help="requests at once (1)")
    serve.add_argument("--threads", type=values.threads_or_all, default=0, help="0: all cores")
    serve.add_argument("--speculate", choices=["ngram"],
                       help="draft tokens from the text so far; several tokens per round trip")  # fmt: skip
    serve.add_argument("--grid", choices=["x32", "x16"], default="x32",
                       help="how exact partials travel: 4 or 2 bytes per channel (x32)")  # fmt: skip
    serve.add_argument("--prompt-cache", type=values.size(), default=None, metavar="SIZE",
                       help="memory for earlier prompts (1/8 of the machine, at most 2GiB)")  # fmt: skip
    serve.add_argument("--engine-memory", type=values.memory(64 << 20), default=None, metavar="SIZE",
                       help="what llama.cpp may take besides the loaded model, before it is started again "
                            "(1/4 of the machine, at least 4GiB, and the prompt cache)")  # fmt: skip
    serve.add_argument("--local-cache", type=values.memory(1 << 20), default=1 << 30,
                       metavar="SIZE", help="memory for experts that no node holds (1GiB)")  # fmt: skip
    serve.add_argument("--cache-dir", type=values.path, metavar="DIR",
                       help="hashes, grids and the demo model (the user's cache)")  # fmt: skip


def config_of(args: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """
    Put the settings together.

    Raises:
        ConfigError: settings contradict each other, or name files and folders that cannot be used.
    """
    if args.no_seal and args.require_sealed:
        raise ConfigError("--no-seal contradicts --require-sealed")
    for option, folder in (("--cache-dir", args.cache_dir), ("--record", args.record)):
        if folder is not None and (why := values.why_not_writable(folder)) is not None:
            raise ConfigError(f"{option} {folder}: {why}; choose another folder")
    return Config(
        listen=ListenAt.of(args.listen, args.public_url, args.tls_cert, args.tls_key),
        dial=args.dial,
        links=not args.no_links,
        key_file=_key_file(args, environment),
        seal=not args.no_seal,
        require_sealed=args.require_sealed,
        model=args.model,
        cache_dir=args.cache_dir or default_cache_dir(environment),
        name=args.name,
        relay=args.relay,
        relay_token=_relay_token(args),
        host=args.host,
        port=args.port,
        api_keys=_api_keys(args),
        context=args.context,
        parallel=args.parallel,
        threads=args.threads,
        speculate=args.speculate,
        grid=Grid[args.grid.upper()],
        offload=Offload(args.offload),
        hedge=args.hedge,
        allow_inexact=args.allow_inexact,
        local_cache_bytes=args.local_cache,
        prompt_cache_bytes=args.prompt_cache,
        engine_memory_bytes=args.engine_memory,
        record=args.record,
    )


def _key_file(args: argparse.Namespace, environment: Mapping[str, str]) -> Path | None:
    """Say where this backbone's key is kept; None, with a warning, if it cannot be where it is by default."""
    path: Path = args.key_file or default_key_file(environment, "backbone")
    if args.key_file is None and args.relay is not None and not args.no_seal:
        try:
            kept_identity(path)
        except ConfigError as exc:
            log.warning("%s; this backbone has another key at each start, which nodes cannot pin", exc)
            return None
    return path


def _relay_token(args: argparse.Namespace) -> str | None:
    token: str | None = args.relay_token
    if args.relay_token_file is not None:
        if token is not None:
            raise ConfigError("--relay-token and --relay-token-file contradict each other: give one")
        token, *more = _secrets_in(args.relay_token_file)
        if more:
            raise ConfigError(f"--relay-token-file {args.relay_token_file}: it holds more than one token")
    if args.relay is not None and token is None:
        raise ConfigError(
            "--relay needs --relay-token, --relay-token-file or BACKBONE_RELAY_TOKEN: what `relay serve` "
            "printed for backbones"
        )
    return token


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Give all keys that were named; those in the environment count when no option names one."""
    given = tuple(args.api_key or ())
    if args.api_key_file is not None:
        given += _secrets_in(args.api_key_file)
    keys: tuple[str, ...] = given or args.env_keys
    return keys


def _secrets_in(path: Path) -> tuple[str, ...]:
    try:
        return values.secrets_in(path)
    except BadValue as exc:
        raise ConfigError(str(exc)) from exc


def main(argv: list[str] | None = None) -> int:
    """Run until Ctrl-C; the exit status is 1 when the backbone could not serve, with the reason on stderr."""
    log_to_stderr(logging.WARNING)
    try:
        args = parser(os.environ).parse_args(argv)
        level = logging.INFO if args.command == "serve" else logging.WARNING
        log_to_stderr(logging.DEBUG if getattr(args, "verbose", False) else level)
        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
        if args.command == "demo-model":
            return run_blocking(lambda: _demo_model(args))
        if args.command == "doctor":
            return run_blocking(lambda: doctor.run(args.relay, args.model, sys.stdout))
        config = config_of(args, os.environ)
        return run_async(lambda: _serve(config), stopped_status=0)
    except (BackboneError, OSError) as exc:
        print(f"backbone: {exc}", file=sys.stderr)
        return 1


def _demo_model(args: argparse.Namespace) -> int:
    cache_dir = args.cache_dir or default_cache_dir(os.environ)
    print(ensure_demo_model(cache_dir, args.experts, args.kind), flush=True)
    return 0


async def _serve(config: Config) -> int:
    async with Backbone(config) as backbone:
        count = len(config.api_keys)
        keys = f"{count} API key{'s' if count > 1 else ''}" if count else "no API key needed"
        print(f"{clean(backbone.model.name)} at {backbone.url}/v1  ({keys})", flush=True)
        if not count and not _is_loopback(config.host):
            log.warning("everybody who reaches %s may ask: give --api-key or --api-key-file", backbone.url)
        if config.relay is None:
            print("no relay given: all experts are computed on this machine", flush=True)
        try:
            await backbone.serving()
        finally:
            print("backbone: stopping", flush=True)
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    leave(main())
