"""The relay as a whole: a real server, real sockets, peers that behave and peers that do not."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from relay.config import Config
from relay.server import RelayServer
from relay.wire.close import CloseCode
from relay.wire.frames import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, Frame, FrameType
from relay.wire.messages import Assign, Drain, Failure, Hello, Offer, Peers, Welcome
from relay.wire.pieces import pieces
from relay.wire.session import (
    CancelReceived,
    Closed,
    DispatchReceived,
    FailureReceived,
    PartialReceived,
)
from tests.fakes.peers import PARTIAL, Backbone, Node, closed, run, slice_name

CONFIG = Config(host="127.0.0.1", port=0, backpressure_s=0.1, drain_s=0.2)


async def serving(relay: RelayServer, number: int = 1) -> Node:
    """A node that is connected, assigned and ready."""
    node = await Node(relay, number).__aenter__()
    await node.offer()
    await node.serve()
    return node


def test_a_call_goes_through_and_comes_back() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone, Node(relay) as node:
            await backbone.register()
            await node.offer()
            await node.serve()
            peers = await backbone.nodes(1)
            (peer,) = peers.values()
            assert dict(peer.experts) == {0: (0, 1), 1: (0, 1)} and peer.path == "relayed"
            await backbone.call(peer, 77, deadline_ms=5000)
            call = await node.expect(DispatchReceived)
            assert (call.call_id, call.epoch, call.deadline_ms) == (77, node.assign.epoch, 5000)
            assert call.peer == node.assign.peer
            node.session.send_partial(call.peer, call.call_id, call.epoch, PARTIAL)
            await node.flush()
            answer = await backbone.expect(PartialReceived)
            assert (answer.peer, answer.call_id, answer.partial) == (peer.peer, 77, PARTIAL)
            assert relay.hub.status()["open_calls"] == 0

    run(test)


def test_node_that_comes_first_waits_for_a_backbone() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Node(relay) as node:
            await node.offer()
            await asyncio.sleep(0.05)
            assert not any(isinstance(event, Assign) for event in node.seen)
            async with Backbone(relay) as backbone:
                await backbone.register()
                await node.serve()
                assert len(await backbone.nodes(1)) == 1

    run(test)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"garbage", CloseCode.PROTOCOL),
        ("text", CloseCode.PROTOCOL),
        ("", CloseCode.PROTOCOL),
        (Frame(FrameType.PAUSE, b'{"paused":true}').encode(), CloseCode.PROTOCOL),
        (bytes(100_000), CloseCode.MESSAGE_TOO_BIG),  # a stranger has one Hello, not the largest frame
        (b"ES\x01" + bytes(29), CloseCode.VERSION),
    ],
    ids=["garbage", "text", "empty text", "no hello", "too large", "version 2"],
)
def test_stranger_who_does_not_speak_the_protocol_is_closed(message: Any, code: int) -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay:
            url = relay.url.replace("http", "ws") + "/v1/session"
            async with connect(url, compression=None, proxy=None) as socket:
                with contextlib.suppress(ConnectionClosed):  # it may be refused before all of it is sent
                    await socket.send(message)
                async with asyncio.timeout(5):
                    await socket.wait_closed()
                assert socket.close_code == code
            assert relay.hub.status()["sessions"] == 0

    run(test)


@pytest.mark.parametrize(
    ("size_bytes", "code"),
    [
        (MAX_MESSAGE_BYTES + 1, CloseCode.TOO_LARGE),
        (MAX_MESSAGE_BYTES + 100_000, CloseCode.MESSAGE_TOO_BIG),  # refused before it is read
    ],
)
def test_peer_that_sends_more_than_any_message_is_closed(size_bytes: int, code: int) -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone:
            await backbone.register()
            await backbone.expect(Peers)
            with contextlib.suppress(ConnectionClosed):
                await backbone.socket.send(bytes(size_bytes))
            assert (await closed(backbone)).code == code
            assert relay.hub.status()["sessions"] == 0

    run(test)


def test_node_that_was_asked_nothing_sends_no_long_message() -> None:
    """It is refused by what it announces, before a byte of it is kept."""

    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Node(relay) as node:
            await node.offer()
            with contextlib.suppress(ConnectionClosed):
                await node.socket.send(bytes(2 << 20))
            assert (await closed(node)).code == CloseCode.MESSAGE_TOO_BIG

    run(test)


def test_pieces_of_what_is_never_finished_count_as_memory() -> None:
    async def test() -> None:
        async with RelayServer(replace(CONFIG, memory_bytes=300_000)) as relay, Node(relay) as node:
            offer = pieces(Frame(FrameType.OFFER, b" " * 500_000).encode())
            with contextlib.suppress(ConnectionClosed):
                for piece in offer[:-1]:
                    await node.socket.send(piece)
            end = await closed(node)
            assert end.code == CloseCode.OVERLOADED
            assert "memory" in end.reason

    run(test)


@pytest.mark.parametrize(
    "kind", [FrameType.PAUSE, FrameType.OFFER, FrameType.FAILURE, FrameType.ECHO, FrameType.PARTIAL]
)
def test_node_that_floods_is_closed_by_name_and_another_pair_goes_on(kind: FrameType) -> None:
    payloads = {
        FrameType.PAUSE: b'{"paused":true}',
        FrameType.OFFER: Offer("k", 0, 1.0, None, False, "n").to_payload(),
    }

    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone, Node(relay, 2) as stranger:
            await backbone.register()
            node = await serving(relay)
            await stranger.offer()
            ids = (1, 1, 1) if kind not in payloads else ()
            flood = Frame(kind, payloads.get(kind, bytes(100)), *ids).encode()
            with contextlib.suppress(ConnectionClosed):
                for _ in range(300):
                    await stranger.socket.send(flood)
            end = await closed(stranger)
            assert end.code == CloseCode.OVERLOADED and ("too many" in end.reason)
            assert node.session.closed is None
            assert relay.hub.status()["sessions"] == 2
            await node.__aexit__(None, None, None)

    run(test)


def test_session_elsewhere_is_not_found_and_plain_http_is_told_to_upgrade() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, httpx.AsyncClient() as http:
            with pytest.raises(InvalidStatus, match="404"):
                await connect(relay.url.replace("http", "ws") + "/v2/session", proxy=None)
            assert (await http.get(f"{relay.url}/v1/session")).status_code == 426

    run(test)


def test_backbone_with_a_wrong_token_is_refused() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay:
            for token, why in (("wrong", "wrong backbone token"), (None, "no backbone token was given")):
                async with Backbone(relay, token=token) as backbone:
                    end = await closed(backbone)
                    assert (end.code, end.reason) == (CloseCode.AUTH, why)

    run(test)


def test_reconnect_with_the_same_secret_replaces_the_ghost_at_once() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone:
            await backbone.register()
            ghost = await serving(relay)
            (old,) = (await backbone.nodes(1)).values()
            await ghost.stop_reading()
            again = await serving(relay)
            (new,) = (await backbone.expect(Peers, lambda p: p.nodes and p.nodes[0].peer != old.peer)).nodes
            assert new.node_id == old.node_id and new.epoch != old.epoch
            assert len(relay.hub.status()["nodes"]) == 1
            await again.stop()
            await ghost.stop()

    run(test)


def test_node_whose_connection_broke_comes_back_to_its_place_by_token() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone:
            await backbone.register()
            lost, other = await serving(relay, 1), await serving(relay, 2)
            await backbone.nodes(2)
            other.seen.clear()
            token = relay.hub._by_id[lost.hello.id].resume_token
            await lost.stop()
            await backbone.nodes(1)
            assert relay.hub.status()["away"] == [lost.hello.id[:8]]
            async with Node(relay, 1, secret="f" * 32) as thief:
                assert (await closed(thief)).code == CloseCode.AUTH
            async with Node(relay, 1, resume=True, resume_token=token) as again:
                welcome = await again.expect(Welcome)
                assert welcome.resumed and welcome.resume not in (None, token)
                again.seen.append(welcome)
                await again.offer()
                await again.serve()
                assert again.assign.layers == lost.assign.layers and again.assign.epoch != lost.assign.epoch
                await backbone.nodes(2)
                assert not [event for event in other.seen if isinstance(event, Assign)], "nothing moved"
                assert relay.hub.status()["away"] == []
            await other.stop()

    run(test)


def test_place_is_kept_for_a_time_and_not_for_who_says_goodbye() -> None:
    async def test() -> None:
        config = replace(CONFIG, resume_s=0.2)
        async with RelayServer(config) as relay, Backbone(relay) as backbone:
            await backbone.register()
            leaves, breaks = await serving(relay, 1), await serving(relay, 2)
            await backbone.nodes(2)
            leaves.session.send_bye("tab closed")
            await leaves.flush()
            await backbone.nodes(1)
            assert relay.hub.status()["away"] == []
            await breaks.stop()
            await backbone.nodes(0)
            assert relay.hub.status()["away"] == [breaks.hello.id[:8]]
            while relay.hub.status()["away"]:
                await asyncio.sleep(0.02)
            assert not relay.hub.pool.away
            await leaves.stop()

    run(test)


def test_places_are_bounded_and_the_oldest_is_given_up_first() -> None:
    async def test() -> None:
        config = replace(CONFIG, resume_places=2)
        async with RelayServer(config) as relay, Backbone(relay) as backbone:
            await backbone.register()
            nodes = [await serving(relay, number) for number in range(1, 5)]
            await backbone.nodes(4)
            tokens = [relay.hub._by_id[node.hello.id].resume_token for node in nodes]
            for left, node in enumerate(nodes):
                await node.stop()
                await backbone.nodes(3 - left)
            kept = [node.hello.id[:8] for node in nodes[2:]]
            assert relay.hub.status()["away"] == kept
            assert list(relay.hub.pool.away) == [node.hello.id for node in nodes[2:]]
            for number, token, resumed in ((1, tokens[0], False), (4, tokens[3], True)):
                async with Node(relay, number, resume=True, resume_token=token) as again:
                    assert (await again.expect(Welcome)).resumed is resumed
            assert relay.hub.status()["away"] == kept, "who says goodbye before it offers took no place"

    run(test)


def test_ghost_learns_that_it_was_replaced() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Node(relay) as ghost:
            await ghost.offer()
            async with Node(relay) as again:
                await again.offer()
                assert (await closed(ghost)).code == CloseCode.REPLACED

    run(test)


def test_wrong_secret_for_a_live_id_is_refused_and_the_live_one_stays() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone:
            await backbone.register()
            node = await serving(relay)
            await backbone.nodes(1)
            async with Node(relay, secret="f" * 32) as thief:
                assert (await closed(thief)).code == CloseCode.AUTH
            assert len(relay.hub.status()["nodes"]) == 1 and node.session.closed is None
            await node.stop()

    run(test)


def test_sender_hears_at_once_when_the_node_vanishes_in_a_call() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone:
            await backbone.register()
            node = await serving(relay)
            (peer,) = (await backbone.nodes(1)).values()
            await backbone.call(peer, 77)
            await node.expect(DispatchReceived)
            await node.stop()
            failure = await backbone.expect(FailureReceived)
            assert (failure.peer, failure.call_id, failure.epoch) == (peer.peer, 77, peer.epoch)
            assert (failure.failure.code, failure.failure.phase) == ("gone", "return")
            await backbone.nodes(0)
            await backbone.call(peer, 78)
            assert (await backbone.expect(FailureReceived)).failure.phase == "send"

    run(test)


def test_node_may_not_be_called_by_a_backbone_it_is_not_paired_with() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone:
            await backbone.register()
            node = await serving(relay)
            (peer,) = (await backbone.nodes(1)).values()
            async with Backbone(relay, number=1002) as other:
                await other.register()
                await other.nodes(0)
                await other.call(peer, 5)
                assert (await other.expect(FailureReceived)).failure.code == "gone"
            await node.stop()

    run(test)


def test_sender_hears_at_once_when_its_node_goes_to_another_backbone() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone:
            await backbone.register()
            nodes = [await serving(relay, n) for n in (1, 2)]
            peers = await backbone.nodes(2)
            for call_id, peer in enumerate(peers.values(), start=1):
                await backbone.call(peer, call_id)
            for node in nodes:
                await node.expect(DispatchReceived)
            async with Backbone(relay, number=1002) as other:
                await other.register()
                failure = await backbone.expect(FailureReceived)
                assert failure.failure.message == "the node works for another backbone now"
                for node in nodes:
                    await node.stop()

    run(test)


def test_failure_and_cancel_reach_the_other_end() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone:
            await backbone.register()
            node = await serving(relay)
            (peer,) = (await backbone.nodes(1)).values()
            await backbone.call(peer, 1)
            call = await node.expect(DispatchReceived)
            backbone.session.send_cancel(peer.peer, 1, peer.epoch)
            await backbone.flush()
            assert (await node.expect(CancelReceived)).call_id == 1
            failure = Failure("not_held", "no", "compute", 0, 3)
            node.session.send_failure(call.peer, 1, call.epoch, failure)
            await node.flush()
            assert (await backbone.expect(FailureReceived)).failure == failure
            await node.stop()

    run(test)


def test_receiver_that_never_reads_is_bounded_and_harms_no_other_pair() -> None:
    async def test() -> None:
        config = replace(CONFIG, queue_bytes=1 << 20, stall_s=60.0)
        async with RelayServer(config) as relay, Backbone(relay) as backbone:
            await backbone.register()
            nodes = {f"{n:032x}": await serving(relay, n) for n in (1, 2)}
            peers = await backbone.nodes(2)
            stuck_id, good_id = sorted(nodes)
            await nodes[stuck_id].stop_reading()
            x = bytes(4 * 50_000)
            for call_id in range(1, 60):  # 12 MB: far more than sockets and queue hold
                await backbone.call(peers[stuck_id], call_id, x)
            refused = await backbone.expect(FailureReceived)
            assert refused.failure.code == "overloaded"
            status = {node["id"]: node for node in relay.hub.status()["nodes"]}
            assert status[stuck_id[:8]]["queued_bytes"] <= (1 << 20)

            started = asyncio.get_running_loop().time()
            for call_id in range(1000, 1020):
                await backbone.call(peers[stuck_id], call_id + 100, x)  # refused at once by now
                await backbone.call(peers[good_id], call_id)
                call = await nodes[good_id].expect(DispatchReceived)
                nodes[good_id].session.send_partial(call.peer, call.call_id, call.epoch, PARTIAL)
                await nodes[good_id].flush()
                await backbone.expect(PartialReceived)
            assert asyncio.get_running_loop().time() - started < 2.0
            for node in nodes.values():
                await node.stop()

    run(test)


def test_receiver_that_reads_slowly_holds_its_own_sender_back_and_no_other_pair() -> None:
    async def test() -> None:
        config = replace(CONFIG, queue_bytes=1 << 20, backpressure_s=1.0)
        async with RelayServer(config) as relay, Backbone(relay) as backbone:
            await backbone.register()
            slow = await serving(relay, 1)
            (peer,) = (await backbone.nodes(1)).values()

            async def read_slowly() -> None:
                while True:
                    slow.socket.transport.pause_reading()
                    await asyncio.sleep(0.02)
                    slow.socket.transport.resume_reading()
                    await asyncio.sleep(0.002)

            reading = asyncio.create_task(read_slowly())
            x = bytes(4 * 50_000)
            for call_id in range(1, 60):  # alone with its node, the sender is held back and nothing is lost
                await backbone.call(peer, call_id, x)
            await slow.expect(DispatchReceived, lambda call: call.call_id == 59)
            assert sum(isinstance(event, DispatchReceived) for event in slow.seen) == 58

            quick = await serving(relay, 2)
            quick_peer = (await backbone.nodes(2))[quick.hello.id]
            for call_id in range(100, 160):
                await backbone.call(peer, call_id, x)
            started = asyncio.get_running_loop().time()
            await backbone.call(quick_peer, 7)
            await quick.expect(DispatchReceived)
            assert asyncio.get_running_loop().time() - started < 2.0
            reading.cancel()
            for node in (slow, quick):
                await node.stop()

    run(test)


def test_receiver_that_takes_no_bytes_for_long_is_dropped() -> None:
    async def test() -> None:
        config = replace(CONFIG, queue_bytes=1 << 20, stall_s=0.3, ping_interval_s=0.4)
        async with RelayServer(config) as relay, Backbone(relay) as backbone:
            await backbone.register()
            node = await serving(relay)
            (peer,) = (await backbone.nodes(1)).values()
            await node.stop_reading()
            for call_id in range(1, 60):
                await backbone.call(peer, call_id, bytes(4 * 50_000))
            await backbone.nodes(0)
            assert relay.hub.status()["nodes"] == []
            await node.stop()

    run(test)


def test_expired_calls_are_dropped_from_a_waiting_queue() -> None:
    async def test() -> None:
        config = replace(CONFIG, queue_bytes=32 << 20)
        async with RelayServer(config) as relay, Backbone(relay) as backbone:
            await backbone.register()
            node = await serving(relay)
            (peer,) = (await backbone.nodes(1)).values()
            node.socket.transport.pause_reading()
            for call_id in range(1, 60):
                await backbone.call(peer, call_id, bytes(4 * 50_000), deadline_ms=50)
            await backbone.call(peer, 99, deadline_ms=60_000)
            await asyncio.sleep(0.3)
            node.socket.transport.resume_reading()
            await node.expect(DispatchReceived, lambda call: call.call_id == 99)
            arrived = sum(isinstance(event, DispatchReceived) for event in node.seen)
            assert arrived < 50
            await node.stop()

    run(test)


def test_flood_of_calls_to_nobody_is_answered_or_closed_but_bounded() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone, Node(relay, 2) as node:
            await backbone.register()
            await node.offer()
            await node.serve()
            (peer,) = (await backbone.nodes(1)).values()
            flood = Frame(FrameType.CANCEL, b"", 4_000_000_000, 1, 1).encode()
            dispatch = Frame(FrameType.DISPATCH, bytes(100), 4_000_000_000, 1, 1).encode()
            for _ in range(2000):
                await backbone.socket.send(flood)
                await backbone.socket.send(dispatch)
            await backbone.call(peer, 7)
            assert (await node.expect(DispatchReceived)).call_id == 7

    run(test)


def test_paused_node_is_left_out_until_it_resumes() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Backbone(relay) as backbone:
            await backbone.register()
            node = await serving(relay)
            await backbone.nodes(1)
            node.session.send_pause(True)
            await node.flush()
            await backbone.nodes(0)
            node.session.send_pause(False)
            await node.flush()
            await backbone.nodes(1)
            await node.stop()

    run(test)


def test_silent_peer_is_closed_and_answering_peer_is_not() -> None:
    async def test() -> None:
        async with RelayServer(replace(CONFIG, ping_interval_s=0.1)) as relay:
            url = relay.url.replace("http", "ws") + "/v1/session"
            async with Node(relay) as node, connect(url, compression=None, proxy=None) as silent:
                await node.offer()
                hello = Hello("node", "9" * 32, "5" * 32)
                await silent.send(Frame(FrameType.HELLO, hello.to_payload()).encode())
                async with asyncio.timeout(5):
                    await silent.wait_closed()
                assert silent.close_code == CloseCode.TIMEOUT
                assert node.session.closed is None
                assert relay.hub.status()["nodes"][0]["rtt_ms"] is not None

    run(test)


def test_relay_that_is_full_says_so() -> None:
    async def test() -> None:
        async with RelayServer(replace(CONFIG, max_sessions=1)) as relay, Node(relay, 1) as node:
            await node.offer()
            async with Node(relay, 2) as late:
                assert (await closed(late)).code == CloseCode.OVERLOADED

    run(test)


def test_stopping_relay_drains_then_says_goodbye() -> None:
    async def test() -> None:
        relay = await RelayServer(CONFIG).__aenter__()
        backbone = await Backbone(relay).__aenter__()
        await backbone.register()
        node = await serving(relay)
        (peer,) = (await backbone.nodes(1)).values()
        await backbone.call(peer, 77)
        call = await node.expect(DispatchReceived)
        stopping = asyncio.create_task(relay.__aexit__(None, None, None))
        assert (await backbone.expect(Drain)).reconnect_after_s == CONFIG.reconnect_after_s
        await node.expect(Drain)
        node.session.send_partial(call.peer, call.call_id, call.epoch, PARTIAL)
        await node.flush()
        await backbone.expect(PartialReceived)
        for peer_ in (backbone, node):
            end = await closed(peer_)
            assert (end.code, end.by_peer) == (CloseCode.GOING_AWAY, True)
        await stopping

    run(test)


def test_after_a_restart_everybody_finds_together_again() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay:
            backbone = await Backbone(relay).__aenter__()
            await backbone.register()
            nodes = [await serving(relay, n) for n in (1, 2)]
            before = {n.hello.id: n.assign.layers for n in nodes}
            await relay.kill()
            assert isinstance(await closed(backbone), Closed)
            relay2 = RelayServer(replace(CONFIG, port=relay.port, backbone_token=relay.backbone_token))
            async with relay2:
                everything = tuple(slice_name(n, e) for n in range(2) for e in range(2))
                again = [await Node(relay2, n).__aenter__() for n in (1, 2)]
                for node in again:
                    await node.offer(inventory=everything)
                async with Backbone(relay2) as backbone2:
                    await backbone2.register()
                    for node in again:
                        await node.serve()
                        assert node.assign.layers == before[node.hello.id]
                    assert len(await backbone2.nodes(2)) == 2
                for node in (*nodes, *again):
                    await node.stop()
            await backbone.stop()

    run(test)


def test_welcome_says_who_the_relay_is_and_what_it_takes() -> None:
    async def test() -> None:
        async with RelayServer(CONFIG) as relay, Node(relay) as node:
            welcome = await node.expect(Welcome)
            assert welcome.relay.startswith("relay/") and welcome.max_frame_bytes == MAX_FRAME_BYTES

    run(test)
