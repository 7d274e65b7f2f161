"""A real swarm in the lab: `relay serve` on the public host, `backbone serve` in hA, `expert-node` in hB."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.natlab.lab import RELAY, RELAY_2, Lab

PORT, DOOR_PORT = 8765, 8080
TOKEN = "natlab-token"
READY_S = 60.0
POLL_S = 0.02
PAUSE_S = 0.03  # between requests: two cores carry all three programs, and the lab
ANSWERED = 'relay_frames_forwarded_total{type="PARTIAL"}'


@dataclass(frozen=True, slots=True)
class Joined:
    """
    What became of a node that joined, counted from the moment the relay knew it.

    ended: the path that carried calls at the end. direct_after_ms: None if it never was direct.
    """

    ended: str
    first_answer_ms: float
    direct_after_ms: float | None


class LabSwarm:
    """The swarm's processes in one lab; logs and caches lie in `folder`."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.alone = ""  # what the backbone answers without nodes, once a test asked
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        self._relay: http.client.HTTPConnection | None = None

    def start_relay(self, *options: str) -> None:
        """Start the relay on all of its host's addresses and wait for it."""
        self._start("relay", "relay", "relay.cli", "serve", "--stun-addresses", f"{RELAY},{RELAY_2}",
                    "--backbone-token", TOKEN, "--port", str(PORT), *options)  # fmt: skip
        self.wait(lambda: self._accepts("relay", (RELAY, PORT)), "relay")

    def start_backbone(self, model: Path) -> None:
        """Start the backbone behind NAT A and wait until it is registered and its door is open."""
        self._start("hA", "backbone", "backbone.cli", "serve", "--model", str(model),
                    "--relay", self.relay_url, "--relay-token", TOKEN, "--port", str(DOOR_PORT),
                    "--threads", "1", "--context", "512", "--offload", "always",
                    "--cache-dir", str(self.folder / "cache"))  # fmt: skip
        self.wait(lambda: self._accepts("hA", ("127.0.0.1", DOOR_PORT)), "backbone")
        self.wait(lambda: len(self.status()["backbones"]) == 1, "backbone")

    def start_node(self, name: str = "node") -> None:
        """Start a headless node behind NAT B."""
        self._nodes[name] = self._start(
            "hB", name, "backbone.node.cli", "--relay", self.relay_url, "--memory", "64MB",
            "--threads", "1", "--name", name,
        )  # fmt: skip

    @property
    def relay_url(self) -> str:
        return f"http://{RELAY}:{PORT}"

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._get("/status.json"))
        return found

    def answered(self) -> float:
        """How many partials the relay has passed on."""
        return self.metric(ANSWERED)

    def metric(self, name: str) -> float:
        """Give one of the relay's metrics, all labels together."""
        lines = self._get("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def node(self, name: str = "node") -> dict[str, Any] | None:
        """What the relay says of a node; None while it is not here."""
        return next((node for node in self.status()["nodes"] if node["name"] == name), None)

    def wait_ready(self, name: str = "node", unlike: int = 0) -> dict[str, Any]:
        """Wait until a node holds all it was assigned, in another session than `unlike`."""

        def ready() -> bool:
            node = self.node(name)
            return (
                node is not None
                and node["peer"] != unlike
                and 0 < node["slices_assigned"] == node["slices_ready"]
            )

        self.wait(ready, name)
        found = self.node(name)
        assert found is not None
        return found

    def process(self, name: str = "node") -> subprocess.Popen[str]:
        return self._nodes[name]

    def complete(self, tokens: int = 4) -> str:
        """Ask the backbone for a few tokens; returns them."""
        connection = self._connection("hA", ("127.0.0.1", DOOR_PORT))
        body = json.dumps({"prompt": "abc", "max_tokens": tokens, "temperature": 0})
        try:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            said = answer.read().decode()
            assert answer.status == 200, said
            return str(json.loads(said)["choices"][0]["text"])
        finally:
            connection.close()

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Ask the backbone without pause while the block runs; a request that fails fails the block."""
        stop = threading.Event()
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                while not stop.is_set():
                    self.complete()
                    stop.wait(PAUSE_S)
            except BaseException as exc:
                failures.append(exc)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]

    def join(self, watch_s: float = 0.0, until: str = "", name: str = "node") -> Joined:
        """
        Let a node join while the backbone is asked all the time; watch for `watch_s` what becomes of it, or
        `until` its path is that.

        The first answer is the first partial that the relay passed on.
        """
        before = self.answered()
        with self.traffic():
            self.start_node(name)
            self.wait(lambda: self._path(name) is not None, name)
            joined = time.monotonic()
            first = direct = path = None
            while (after := time.monotonic() - joined) < max(watch_s, READY_S if first is None else 0.0):
                path = self._path(name)
                if first is None and self.answered() > before:
                    first = after
                if direct is None and path == "direct":
                    direct = after
                if first is not None and path == until:
                    break
                time.sleep(POLL_S)
        assert first is not None, f"no answer within {READY_S:.0f} s\n{self.log(name)}"
        return Joined(path or "gone", first * 1e3, None if direct is None else direct * 1e3)

    def leave(self, name: str = "node") -> None:
        """End a node and wait until the relay knows."""
        self._nodes.pop(name).terminate()
        self.wait(lambda: self._path(name) is None, name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    # --- details

    def _path(self, name: str) -> str | None:
        """The kind of path that carries a node's calls, as its backbone says; None while it is not here."""
        for node in self.status()["nodes"]:
            if node["name"] == name:
                return "relayed" if node["path"]["lane"] == "relayed" else "direct"
        return None

    def _start(self, host: str, name: str, module: str, *argv: str) -> subprocess.Popen[str]:
        clean = {"HOME": str(self.folder), "PYTHONPATH": os.getcwd(), "PYTHONUNBUFFERED": "1"}
        command = (sys.executable, "-m", module, *argv)
        return self.lab.start(host, *command, log=self.folder / f"{name}.log", environment=clean)

    def wait(self, ready: Callable[[], bool], name: str) -> None:
        give_up = time.monotonic() + READY_S
        while not ready():
            assert time.monotonic() < give_up, f"{name} is not ready after {READY_S:.0f} s\n{self.log(name)}"
            time.sleep(POLL_S)

    def _accepts(self, host: str, address: tuple[str, int]) -> bool:
        try:
            self.lab.connect(host, address).close()
            return True
        except OSError:
            return False

    def _connection(self, host: str, address: tuple[str, int]) -> http.client.HTTPConnection:
        made = http.client.HTTPConnection(*address, timeout=READY_S)
        made.sock = self.lab.connect(host, address, READY_S)
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _get(self, path: str) -> str:
        if self._relay is None or self._relay.sock is None:
            self._relay = self._connection("relay", (RELAY, PORT))
        try:
            self._relay.request("GET", path)
            return self._relay.getresponse().read().decode()
        except ConnectionError:  # the relay closes connections that nobody used for a while
            self._relay = self._connection("relay", (RELAY, PORT))
            self._relay.request("GET", path)
            return self._relay.getresponse().read().decode()

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
