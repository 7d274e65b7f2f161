/** Links past the relay, the page's end: the handshake, the stream of pieces, and calls that take a link or the relay. */

import assert from 'node:assert/strict';
import { createHash, createHmac } from 'node:crypto';
import { test } from 'node:test';

import { NodeLinks } from '../src/links.js';
import { LOW_BYTES, MAX_BUFFERED_BYTES, MAX_WAITING_BYTES, Outlet, PACKET_BYTES } from '../src/transports/webrtc.js';
import { FrameTooLarge } from '../src/wire/errors.js';
import { decodeFrame, encodeFrame, FrameType } from '../src/wire/frames.js';
import { BEAT_S, hmac, LinkSession, unhex } from '../src/wire/link.js';
import { fromPayload, toPayload } from '../src/wire/messages.js';
import { Reassembler } from '../src/wire/stream.js';

const LINK = 'ab'.repeat(16);
const KEY = '6b'.repeat(32);
const sha256 = (/** @type {Uint8Array} */ data) => createHash('sha256').update(data).digest('hex');
const known = { peer: 3, epoch: 7, key: unhex(KEY) };

/** @param {LinkSession} a @param {LinkSession} b @param {number} [now] */
function carry(a, b, now = 0) {
  for (let said = true; said; ) {
    said = false;
    for (const [from, to] of [[a, b], [b, a]]) {
      for (const data of from.dataToSend()) {
        said = true;
        to.receiveData(data, now);
      }
    }
  }
}

/** @param {Uint8Array<ArrayBuffer>} [key] */
function pair(key = known.key) {
  const opener = new LinkSession(0, { nonce: '11'.repeat(16), link: LINK, known, opens: true, sha256 });
  const acceptor = new LinkSession(0, { nonce: '22'.repeat(16), link: LINK, known: { ...known, key }, opens: false, sha256 });
  opener.start();
  return { opener, acceptor };
}

test('hmac is that of RFC 2104', () => {
  const text = new TextEncoder().encode('accept ab 11 22');
  assert.equal(hmac(sha256, known.key, text), createHmac('sha256', known.key).update(text).digest('hex'));
});

test('ends that know the key are ready', () => {
  const { opener, acceptor } = pair();
  carry(opener, acceptor);
  assert.deepEqual(opener.events(), [{ type: 'LinkReady', link: LINK }]);
  assert.deepEqual(acceptor.events(), [{ type: 'LinkReady', link: LINK }]);
});

test('an end with another key gets nowhere', () => {
  const { opener, acceptor } = pair(unhex('00'.repeat(32)));
  carry(opener, acceptor);
  for (const end of [opener, acceptor]) {
    const [closed] = end.events();
    assert.ok(closed.type === 'Closed' && closed.code === 4401, JSON.stringify(closed));
  }
});

test('a call before the proofs is a breach', () => {
  const { acceptor } = pair();
  acceptor.receiveData(encodeFrame({ type: FrameType.CANCEL, payload: new Uint8Array(0), peer: 1, callId: 1n }), 0);
  const [closed] = acceptor.events();
  assert.ok(closed.type === 'Closed' && closed.code === 4400);
});

test('what comes on a link comes from its peer, whatever the header says', () => {
  const { opener, acceptor } = pair();
  carry(opener, acceptor);
  acceptor.events();
  acceptor.receiveData(encodeFrame({ type: FrameType.CANCEL, payload: new Uint8Array(0), peer: 99, callId: 5n, epoch: 7 }), 0);
  assert.deepEqual(acceptor.events(), [{ type: 'CancelReceived', peer: 3, callId: 5n, epoch: 7 }]);
});

test('a silent end is noticed after two beats', () => {
  const { opener, acceptor } = pair();
  carry(opener, acceptor);
  opener.events();
  let now = 0;
  while (opener.state !== 'closed') {
    now = /** @type {number} */ (opener.nextTimer());
    opener.handleTimer(now);
  }
  assert.ok(now <= 3 * BEAT_S);
});

for (const size of [1, 7, 31, 32, 33, 100, 4096]) {
  test(`frames survive a cut at every ${size} bytes`, () => {
    const frames = [0, 5, 64, 9000].map((n) => encodeFrame({ type: FrameType.PROBE, payload: new Uint8Array(n).fill(n), peer: 1, callId: 2n }));
    const data = new Uint8Array(frames.flatMap((frame) => [...frame]));
    const stream = new Reassembler();
    const found = [];
    for (let at = 0; at < data.length; at += size) found.push(...stream.feed(data.slice(at, at + size)));
    assert.deepEqual(found, frames);
  });
}

test('a length beyond any frame is refused before it is waited for', () => {
  const data = new Uint8Array(32).fill(255, 8, 12);
  assert.throws(() => new Reassembler().feed(data), FrameTooLarge);
});

class FakeChannel {
  constructor() {
    this.readyState = /** @type {RTCDataChannelState} */ ('open');
    this.bufferedAmount = 0;
    this.bufferedAmountLowThreshold = 0;
    /** @type {(() => void)|null} */
    this.onbufferedamountlow = null;
    /** @type {number[]} */
    this.sent = [];
  }

  /** @param {Uint8Array} piece */
  send(piece) {
    this.sent.push(piece.length);
    this.bufferedAmount += piece.length;
  }

  /** The network took everything. */
  take() {
    this.bufferedAmount = 0;
    this.onbufferedamountlow?.();
  }
}

test('a frame leaves in packets of at most 4 KB', () => {
  const channel = new FakeChannel();
  const outlet = new Outlet(/** @type {any} */ (channel), () => assert.fail('stuck'));
  outlet.send(new Uint8Array(12_288 + 1));
  assert.deepEqual(channel.sent, [PACKET_BYTES, PACKET_BYTES, PACKET_BYTES, 1]);
  assert.equal(channel.bufferedAmountLowThreshold, LOW_BYTES);
});

test('a channel is never over-filled, and what waits leaves in order when there is room', () => {
  const channel = new FakeChannel();
  const outlet = new Outlet(/** @type {any} */ (channel), () => assert.fail('stuck'));
  outlet.send(new Uint8Array(3 * MAX_BUFFERED_BYTES));
  assert.ok(channel.bufferedAmount <= MAX_BUFFERED_BYTES);
  while (!outlet.queue.empty || outlet.packets.length) channel.take();
  const heads = Math.ceil((3 * MAX_BUFFERED_BYTES - 32) / 32_768) * (32 + 12); // each piece has a header and a head
  assert.equal(channel.sent.reduce((sum, n) => sum + n, 0), 3 * MAX_BUFFERED_BYTES - 32 + heads);
});

test('a backbone that does not read ends the channel instead of filling memory', () => {
  let stuck = false;
  const outlet = new Outlet(/** @type {any} */ (new FakeChannel()), () => (stuck = true));
  outlet.send(new Uint8Array(MAX_WAITING_BYTES + 2 * MAX_BUFFERED_BYTES));
  assert.ok(stuck);
});

test('a signal this device cannot follow is answered with failed', () => {
  /** @type {any[]} */
  const said = [];
  const links = new NodeLinks({ ways: {}, clock: () => 0, onEvent: () => undefined, signal: (...all) => said.push(all), sha256 });
  const signal = { type: /** @type {const} */ ('Signal'), kind: 'dial', link: LINK, data: { key: KEY, url: 'ws://192.0.2.1:9' } };
  links.signalled({ type: 'SignalReceived', peer: 3, epoch: 7, signal });
  links.signalled({ type: 'SignalReceived', peer: 3, epoch: 7, signal: { ...signal, data: { key: 'short' } } });
  assert.deepEqual(said, [[3, 7, { kind: 'failed', link: LINK, data: { reason: 'dial is not possible here' } }]]);
});

test('a dialled link answers a probe through its own transport', () => {
  /** @type {Uint8Array[]} */
  const out = [];
  /** @type {any} */
  let handlers;
  const transport = { path: 'direct', bytesSent: 0, bytesReceived: 0, movedBytes: 0, send: (/** @type {Uint8Array} */ d) => out.push(d), close: () => undefined };
  const links = new NodeLinks({
    ways: { direct: (_, given) => ((handlers = given), transport) },
    clock: () => 0,
    onEvent: (link, event) => event.type === 'ProbeReceived' && link.session.sendEcho(event.callId, event.epoch, event.answerBytes),
    signal: () => assert.fail('no signal is due'),
    sha256,
  });
  const signal = { type: /** @type {const} */ ('Signal'), kind: 'dial', link: LINK, data: { key: KEY, url: 'ws://192.0.2.1:9' } };
  links.signalled({ type: 'SignalReceived', peer: 3, epoch: 7, signal });
  handlers.onOpen();
  const hello = /** @type {any} */ (fromPayload(FrameType.LINK_HELLO, decodeFrame(out[0]).payload));
  const nonce = '33'.repeat(16);
  const mac = createHmac('sha256', known.key).update(`accept ${LINK} ${hello.nonce} ${nonce}`).digest('hex');
  handlers.onMessage(encodeFrame({ type: FrameType.LINK_PROOF, payload: toPayload({ type: 'LinkProof', nonce, mac }) }));
  const probe = new Uint8Array(8);
  probe[0] = 5;
  handlers.onMessage(encodeFrame({ type: FrameType.PROBE, payload: probe, peer: 1, callId: 9n, epoch: 7 }));
  const echo = decodeFrame(/** @type {Uint8Array} */ (out.at(-1)));
  assert.deepEqual([echo.type, echo.peer, echo.callId, echo.payload.length], [FrameType.ECHO, 3, 9n, 5]);
  transport.bytesSent = 700;
  transport.bytesReceived = 900;
  assert.deepEqual([links.bytesSent, links.bytesReceived], [700, 900], 'counted while it is open');
  links.closeAll('over');
  assert.deepEqual([links.bytesSent, links.bytesReceived], [700, 900], 'and after it ended, once');
  links.closeAll('over again');
  assert.deepEqual([links.bytesSent, links.bytesReceived], [700, 900]);
});
