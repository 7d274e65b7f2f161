"""`backbone serve`: arguments and environment -> Config -> run. `backbone doctor`, `backbone demo-model`."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from backbone import doctor
from backbone.config import Config, default_cache_dir
from backbone.errors import BackboneError, ConfigError
from backbone.experts.standing import Offload
from backbone.lanes.direct import ListenAt
from backbone.lanes.relayed import session_url
from backbone.model.demo_model import ensure_demo_model
from backbone.node.cli import listen_address, size_bytes
from backbone.node.keys import default_key_file
from backbone.server import Backbone
from relay import __version__
from relay.program.running import leave, run_async, run_blocking
from relay.wire.tensors import Grid

ENVIRONMENT_PREFIX = "BACKBONE_"


def parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """The command line; an option left out takes BACKBONE_<OPTION> from the environment, then its default."""

    def default(option: str, otherwise: str | None) -> str | None:
        return environment.get(ENVIRONMENT_PREFIX + option.upper(), otherwise)

    top = argparse.ArgumentParser(
        prog="backbone", description="Serve a Mixture-of-Experts model whose experts a swarm computes."
    )
    top.add_argument("--version", action="version", version=f"backbone {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve a model; OpenAI-compatible")
    model = default("model", None)
    serve.add_argument("--model", type=Path, default=model, required=model is None, metavar="GGUF")
    serve.add_argument("--relay", type=_relay_url, default=default("relay", None), metavar="URL",
                       help="the relay to join; without one all experts are computed here")  # fmt: skip
    serve.add_argument("--relay-token", default=default("relay_token", None), metavar="TOKEN",
                       help="what `relay serve` printed for backbones")  # fmt: skip
    serve.add_argument("--name", default=default("name", "backbone"), help="how nodes see this backbone")
    serve.add_argument(
        "--host", default=default("host", "127.0.0.1"), help="address of the public port (127.0.0.1)"
    )
    serve.add_argument(
        "--port", type=int, default=default("port", "8080"), help="public port; 0: any free one (8080)"
    )
    serve.add_argument("--api-key", action="append", metavar="KEY",
                       help="who may ask, repeatable; none: everybody who reaches the port")  # fmt: skip
    serve.add_argument(
        "--context", type=int, default=default("context", "4096"), help="tokens per slot (4096)"
    )
    serve.add_argument("--parallel", type=int, default=default("parallel", "1"), help="requests at once (1)")
    serve.add_argument("--threads", type=int, default=default("threads", "0"), help="0: all cores")
    serve.add_argument("--speculate", choices=["ngram"], default=default("speculate", None),
                       help="draft tokens from the text so far; several tokens per round trip")  # fmt: skip
    serve.add_argument("--grid", choices=["x32", "x16"], default=default("grid", "x32"),
                       help="how exact partials travel: 4 or 2 bytes per channel (x32)")  # fmt: skip
    serve.add_argument("--listen", type=listen_address, default=default("listen", None), metavar="HOST:PORT",
                       help="let nodes reach this backbone directly")  # fmt: skip
    serve.add_argument("--public-url", default=default("public_url", None), metavar="URL",
                       help="how nodes reach --listen (ws://HOST:PORT)")  # fmt: skip
    serve.add_argument("--tls-cert", type=Path, default=default("tls_cert", None), metavar="PEM",
                       help="certificate of --listen; headless nodes pin it")  # fmt: skip
    serve.add_argument("--tls-key", type=Path, default=default("tls_key", None), metavar="PEM")
    serve.add_argument("--no-links", action="store_true", default=default("no_links", "") == "1",
                       help="let all calls go through the relay")  # fmt: skip
    serve.add_argument("--require-sealed", action="store_true", default=default("require_sealed", "") == "1",
                       help="do not ask nodes whose frames the relay could read")  # fmt: skip
    serve.add_argument("--no-seal", action="store_true", default=default("no_seal", "") == "1",
                       help="let the relay read what passes between nodes and this backbone")  # fmt: skip
    serve.add_argument("--key-file", type=Path, default=default("key_file", None), metavar="PEM",
                       help="this backbone's key, made at the first start (XDG state folder)")  # fmt: skip
    serve.add_argument("--offload", choices=[each.value for each in Offload],
                       default=default("offload", Offload.AUTO.value),
                       help="what nodes get: what comes back within 5 ms of this machine's own (auto), "
                            "what comes back sooner (soonest), all they carry (always)")  # fmt: skip
    serve.add_argument("--hedge", action="store_true", default=default("hedge", "") == "1",
                       help="ask a second holder when the first is late by its own measure")  # fmt: skip
    serve.add_argument("--allow-inexact", action="store_true", default=default("allow_inexact", "") == "1",
                       help="also ask nodes with a kernel that is not exact (webgpu)")  # fmt: skip
    serve.add_argument("--local-cache", type=size_bytes, default=default("local_cache", "1GiB"),
                       metavar="SIZE", help="memory for experts that no node holds (1GiB)")  # fmt: skip
    serve.add_argument("--record", type=Path, default=default("record", None), metavar="FOLDER",
                       help="keep the first answer of each node, for the relay's page /verify")  # fmt: skip
    serve.add_argument("--cache-dir", type=Path, default=default("cache_dir", None), metavar="DIR",
                       help="hashes, grids and the demo model (the user's cache)")  # fmt: skip
    serve.add_argument("--verbose", action="store_true", help="say more")
    examine = commands.add_parser("doctor", help="say what of this machine slows or breaks a backbone")
    examine.add_argument("--relay", type=_relay_url, default=default("relay", None), metavar="URL",
                         help="look at this relay, too, and at the way to it")  # fmt: skip
    examine.add_argument("--model", type=Path, default=model, metavar="GGUF", help="is there memory for it?")
    demo = commands.add_parser("demo-model", help="make the demo model and print its path")
    demo.add_argument("--experts", type=int, default=8)
    demo.add_argument("--kind", default="q8_0")
    demo.add_argument("--cache-dir", type=Path, default=None, metavar="DIR")
    return top


def _relay_url(text: str) -> str:
    try:
        session_url(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return text


def config_of(args: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """
    Put the settings together.

    Raises:
        ConfigError: a BACKBONE_ variable that is no setting; it is a typing error.
    """
    known = {ENVIRONMENT_PREFIX + name.upper() for name in [*vars(args), "api_keys"]}
    for variable in environment:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            raise ConfigError(f"unknown environment variable {variable}")
    keys = args.api_key or [
        key for key in environment.get(ENVIRONMENT_PREFIX + "API_KEYS", "").split(",") if key
    ]
    listen = None
    if args.listen is not None:
        listen = ListenAt.of(args.listen, args.public_url, args.tls_cert, args.tls_key)
    if args.no_seal and args.require_sealed:
        raise ConfigError("--no-seal contradicts --require-sealed")
    return Config(
        listen=listen,
        links=not args.no_links,
        key_file=args.key_file or default_key_file(environment, "backbone"),
        seal=not args.no_seal,
        require_sealed=args.require_sealed,
        model=args.model,
        cache_dir=args.cache_dir or default_cache_dir(environment),
        name=args.name,
        relay=args.relay,
        relay_token=args.relay_token,
        host=args.host,
        port=args.port,
        api_keys=tuple(keys),
        context=args.context,
        parallel=args.parallel,
        threads=args.threads,
        speculate=args.speculate,
        grid=Grid[args.grid.upper()],
        offload=Offload(args.offload),
        hedge=args.hedge,
        allow_inexact=args.allow_inexact,
        local_cache_bytes=args.local_cache,
        record=args.record,
    )


def main(argv: list[str] | None = None) -> int:
    """Run until Ctrl-C; the exit status is 1 when the backbone could not serve, with the reason on stderr."""
    args = parser(os.environ).parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.command == "serve" else logging.WARNING,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        if args.command == "demo-model":
            return run_blocking(lambda: _demo_model(args))
        if args.command == "doctor":
            return run_blocking(lambda: doctor.run(args.relay, args.model, sys.stdout))
        config = config_of(args, os.environ)
        return run_async(lambda: _serve(config), stopped_status=0)
    except BackboneError as exc:
        print(f"backbone: {exc}", file=sys.stderr)
        return 1


def _demo_model(args: argparse.Namespace) -> int:
    cache_dir = args.cache_dir or default_cache_dir(os.environ)
    print(ensure_demo_model(cache_dir, args.experts, args.kind), flush=True)
    return 0


async def _serve(config: Config) -> int:
    async with Backbone(config) as backbone:
        keys = f"{len(config.api_keys)} API keys" if config.api_keys else "no API key needed"
        print(f"{backbone.model.name} at {backbone.url}/v1  ({keys})", flush=True)
        if config.relay is None:
            print("no relay given: all experts are computed on this machine", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("backbone: stopping", flush=True)
    return 0


if __name__ == "__main__":
    leave(main())
