"""
A learning switch whose ports have delay, loss and a rate; in place of netem, which not every kernel has.

    switch.py PORT[:one_way_ms[:loss_pct[:rate_mbit]]] …

A frame takes the delay of the port it came in at plus that of the port it leaves at; loss and rate likewise.
The delay of a pair of ports is constant, so each pair is a queue in order and nothing is reordered. Good to
about 1 ms up to 3,000 frames a second on one core.
"""

import ctypes
import gc
import os
import random
import select
import socket
import sys
from collections import deque
from time import monotonic

ETH_P_ALL, SOL_PACKET, PACKET_IGNORE_OUTGOING = 3, 263, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
PR_SET_TIMERSLACK = 29
MAX_QUEUED = 20_000  # frames per pair of ports
BUFFER_S = 0.2  # what a port with a rate holds before it drops


class Port:
    """One interface."""

    def __init__(self, spec: str) -> None:
        name, delay_ms, loss_pct, rate_mbit = (*spec.split(":"), "0", "0", "0")[:4]
        self.delay_s = float(delay_ms) / 1e3
        self.loss = float(loss_pct) / 100
        self.bytes_per_s = float(rate_mbit) * 125e3
        self.busy_until = 0.0
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self.socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
            self.socket.setsockopt(socket.SOL_SOCKET, option, 16 << 20)
        self.socket.bind((name, 0))
        self.socket.setblocking(False)


type Queue = deque[tuple[float, bytes]]  # when it is due, the frame


class Switch:
    """All ports, and the frames on their way."""

    def __init__(self, ports: list[Port]) -> None:
        self.ports = ports
        self._by_fd = {port.socket.fileno(): port for port in ports}
        self._by_mac: dict[bytes, Port] = {}
        self._queues: dict[tuple[Port, Port], Queue] = {
            (a, b): deque() for a in ports for b in ports if a != b
        }

    def run(self) -> None:
        fds = list(self._by_fd)
        while True:
            next_due = self._send_due()
            readable, _, _ = select.select(fds, [], [], max(0.0, next_due - monotonic()))
            for fd in readable:
                self._receive(self._by_fd[fd])

    def _send_due(self) -> float:
        """Send what is due; return when the next frame will be."""
        now = monotonic()
        next_due = now + 1.0
        for (_, leaves), queue in self._queues.items():
            while queue:
                due, frame = queue[0]
                if due > now:
                    next_due = min(next_due, due)
                    break
                queue.popleft()
                try:
                    leaves.socket.send(frame)
                except OSError:
                    pass  # a full buffer or a port that went down: lost
                now = monotonic()
        return next_due

    def _receive(self, came: Port) -> None:
        for _ in range(64):
            try:
                frame = came.socket.recv(65_600)
            except OSError:
                return
            now = monotonic()
            self._by_mac[frame[6:12]] = came
            leaves = self._by_mac.get(frame[:6])
            if leaves is None or frame[0] & 1:  # not known yet, or broadcast
                for port in self.ports:
                    if port is not came:
                        self._enqueue(came, port, frame, now)
            elif leaves is not came:
                self._enqueue(came, leaves, frame, now)

    def _enqueue(self, came: Port, leaves: Port, frame: bytes, now: float) -> None:
        queue = self._queues[came, leaves]
        if random.random() < leaves.loss or random.random() < came.loss or len(queue) > MAX_QUEUED:
            return
        due = now + came.delay_s + leaves.delay_s
        rates = [rate for rate in (came.bytes_per_s, leaves.bytes_per_s) if rate]
        if rates:
            start = max(now, leaves.busy_until)
            if start - now > BUFFER_S:
                return
            leaves.busy_until = start + len(frame) / min(rates)
            due += leaves.busy_until - now
        queue.append((due, frame))


def main() -> None:
    gc.disable()
    switch = Switch([Port(spec) for spec in sys.argv[1:]])
    try:  # real time and no timer slack: else waking up is late by more than what is measured
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except OSError:
        pass
    print("up", flush=True)
    switch.run()


if __name__ == "__main__":
    main()
