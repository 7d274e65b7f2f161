"""
Find out how the NAT in front of this machine behaves, by asking a relay's STUN server (RFC 5780 §4.3, §4.4).

    kind = await classify("203.0.113.1", 3478, 3479)

Takes about as long as one round trip behind a friendly NAT, and 1.3 s behind a strict one, where the proof is
an answer that does not come. So it runs beside everything else, and nothing waits for it.
"""

import asyncio
import os
import socket
from time import monotonic

from relay.nat.candidates import NatClass, Observation, nat_class
from relay.nat.stun import CHANGE_IP, CHANGE_PORT, MAX_DATAGRAM_BYTES, Address, Kind, Message, Transaction


async def classify(host: str, port: int, alternate_port: int | None = None) -> NatClass:
    """
    Classify the way from here to that server.

    The server's second address, if it has one, is learnt from its answer; with one address its second port is
    taken to be the next, as it is by default. Does not raise for networks that
    are down or names that do not resolve: that is "no UDP".
    """
    return nat_class(await observe(host, port, alternate_port))


async def observe(host: str, port: int, alternate_port: int | None = None) -> Observation:
    """Ask all questions; the two filtering ones from a socket that has sent nothing to other addresses."""
    nothing = Observation(("", 0), None)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_DGRAM, family=socket.AF_UNSPEC
        )
        server: Address = str(found[0][4][0]), port
        family = found[0][0]
        with _Asker(family) as mapping, _Asker(family) as filtering:
            local = _local_address(family, server), mapping.port
            first, far, near = await asyncio.gather(
                mapping.ask(server),
                filtering.ask(server, CHANGE_IP | CHANGE_PORT),
                filtering.ask(server, CHANGE_PORT),
            )
            if first is None or first.mapped is None:
                return nothing
            other = first.other
            second_port = (server[0], other[1] if other else alternate_port or port + 1)
            by_port, by_address = await asyncio.gather(
                mapping.ask(second_port),
                mapping.ask((other[0], port)) if other else _none(),
            )
    except OSError:
        return nothing
    return Observation(
        local=local,
        mapped=first.mapped,
        mapped_other_port=by_port.mapped if by_port else None,
        mapped_other_address=by_address.mapped if by_address else None,
        answered_from_other_address=_came(far),
        answered_from_other_port=_came(near),
    )


def _came(answer: Message | None) -> bool | None:
    """An answer came through, none came, or the server refused: it cannot answer from there."""
    return False if answer is None else True if answer.kind is Kind.SUCCESS else None


async def _none() -> None:
    return None


def _local_address(family: int, server: Address) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(server)
        return str(probe.getsockname()[0])


class _Asker:
    """One UDP socket and the transactions on it."""

    def __init__(self, family: int) -> None:
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(("", 0))
        self._open: dict[bytes, tuple[Transaction, asyncio.Event]] = {}

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> "_Asker":
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()

    async def ask(self, server: Address, change: int = 0) -> Message | None:
        """Return the answer, or None when none came."""
        transaction = Transaction(os.urandom(12), monotonic(), change)
        answered = asyncio.Event()
        self._open[transaction.transaction_id] = transaction, answered
        while (due := transaction.next_timer()) is not None:
            try:
                await asyncio.wait_for(answered.wait(), max(0.0, due - monotonic()))
            except TimeoutError:
                request = transaction.handle_timer(max(due, monotonic()))
                if request is not None:
                    self._send(request, server)
        return transaction.answer

    def _send(self, request: bytes, server: Address) -> None:
        try:
            self._socket.sendto(request, server)
        except OSError:
            return  # no route, or an ICMP error for an earlier one: the same as no answer

    def _readable(self) -> None:
        while True:
            try:
                data = self._socket.recv(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue
            for transaction, answered in self._open.values():
                if transaction.receive_datagram(data):
                    answered.set()
