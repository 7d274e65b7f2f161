/** A node that seals, between a backbone that does too and a relay that meddles; and the order of what passes. */

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { NodeClient } from '../src/client.js';
import { Keeper } from '../src/store.js';
import { MAX_WAITING_BYTES, SealedPassage } from '../src/transports/sealed.js';
import { SealFault } from '../src/wire/errors.js';
import { decodeFrame, encodeFrame, FrameType } from '../src/wire/frames.js';
import { agreement, fingerprint, hex, newIdentity, Seal, unhex } from '../src/wire/seal.js';
import { RESEND_S } from '../src/wire/sealing.js';
import { FakeKernel, FakeRelay, FakeStore, sha256 } from './fakes.js';

const SLICES = [1, 2, 3].map((worth) => new Uint8Array(102).fill(worth));
const OURS = await newIdentity();
const THEIRS = await newIdentity();
const FINGERPRINT = await fingerprint(THEIRS.public);
const PEER = 9;
const EPOCH = 1;

/** The backbone's half, see relay/wire/seal.py. @param {any} hello @returns {Promise<{answer: any, seal: Seal}>} */
async function answerHello(hello) {
  const pair = /** @type {CryptoKeyPair} */ (await crypto.subtle.generateKey('X25519', false, ['deriveBits']));
  const ephemeral = new Uint8Array(await crypto.subtle.exportKey('raw', pair.publicKey));
  const theirs = await crypto.subtle.importKey('raw', unhex(hello.ephemeral), 'X25519', false, []);
  const secret = new Uint8Array(await crypto.subtle.deriveBits({ name: 'X25519', public: theirs }, pair.privateKey, 256));
  const text = agreement('backbone', EPOCH, unhex(hello.identity), THEIRS.public, unhex(hello.ephemeral), ephemeral);
  const signature = new Uint8Array(await crypto.subtle.sign('Ed25519', THEIRS.key, text));
  const mirror = await Seal.of(secret, text);
  const answer = { type: 'SealAnswer', identity: hex(THEIRS.public), ephemeral: hex(ephemeral), signature: hex(signature) };
  return { answer, seal: new Seal(mirror.openers, mirror.sealers, mirror.derived) };
}

/** Relay and backbone in one; `meddle` may change what the node is sent, or lose it. */
class SealedRelay extends FakeRelay {
  /** @type {Seal|null} */
  seal = null;
  keys = ''; // what an Assign says of the backbone
  deaf = 0; // so many hellos are lost
  hellos = 0;
  /** @type {(data: Uint8Array<ArrayBuffer>) => Uint8Array<ArrayBuffer>[]} */
  meddle = (data) => [data];
  /** @type {Promise<unknown>} */
  busy = Promise.resolve();

  /** @param {Uint8Array} data */
  received(data) {
    this.busy = this.busy.then(async () => {
      const frame = decodeFrame(data);
      if (frame.sealed && this.seal !== null) super.received(await this.seal.open(/** @type {any} */ (data)));
      else super.received(data);
      if (frame.type !== FrameType.SEAL_HELLO) return;
      this.hellos += 1;
      if (this.deaf-- > 0) return;
      const { answer, seal } = await answerHello(JSON.parse(new TextDecoder().decode(frame.payload)));
      this.seal = seal;
      const payload = new TextEncoder().encode(JSON.stringify(answer));
      this.end?.send(encodeFrame({ type: FrameType.SEAL_ANSWER, payload, peer: PEER, epoch: EPOCH }));
      this.waiting.splice(0).forEach((wake) => wake());
    });
  }

  /** @param {number} epoch @param {string} [seal] */
  pair(epoch, seal = hex(THEIRS.public)) {
    this.keys = seal;
    this.assign(epoch, SLICES);
    this.keys = '';
  }

  /** @param {any} message */
  say(message) {
    super.say(message.type === 'Assign' && this.keys ? { ...message, seal: this.keys } : message);
  }

  /** @param {number[]} callIds */
  async ask(...callIds) {
    const { end } = this;
    /** @type {Uint8Array<ArrayBuffer>[]} */
    const plain = [];
    this.end = /** @type {any} */ ({ send: (/** @type {any} */ data) => plain.push(data) });
    for (const callId of callIds) this.dispatch(callId, [0, 2]);
    this.end = end;
    for (const data of plain) {
      const sealed = await /** @type {Seal} */ (this.seal).seal(data);
      for (const said of this.meddle(sealed)) end?.send(said);
    }
  }

  async agreed() {
    while (this.seal === null) await new Promise((wake) => this.waiting.push(() => wake(undefined)));
  }
}

/** @param {Uint8Array<ArrayBuffer>} data @param {number} at @param {number} value */
function withByte(data, at, value) {
  const changed = data.slice();
  changed[at] = value;
  return changed;
}

/** @param {{pinned?: string|null, identity?: import('../src/wire/seal.js').SealIdentity|null, clock?: () => number}} [options] */
async function node({ pinned = null, identity = OURS, clock } = {}) {
  const relay = new SealedRelay();
  const keeper = new Keeper(new FakeStore(), 1000, 20);
  await keeper.open();
  const client = new NodeClient({
    memoryBytes: 1000,
    name: 'test',
    agent: 'test',
    identity: { id: '1'.repeat(32), secret: '2'.repeat(32) },
    power: { battery: null, metered: false },
    connect: relay.connect,
    seal: { identity, why: 'no WebCrypto', pinned },
    loadKernel: async () => new FakeKernel(),
    keeper,
    random: () => 0,
    defer: (task) => void setImmediate(task),
    ...(clock ? { clock } : {}),
    fetchSlice: async (slice) => new Response(new Uint8Array(SLICES.find((data) => sha256(data) === slice) ?? [])),
  });
  client.start();
  const offer = await relay.hear((message) => message.type === 'Offer');
  return { relay, client, offer };
}

const ready = (/** @type {any} */ message) => message.type === 'SliceReady' && message.experts[0]?.length === 3;
/** @param {number} callId @param {string} [type] */
const answered = (callId, type = 'Partial') => (/** @type {any} */ m) => m.type === type && m.callId === callId;

async function serving() {
  const all = await node();
  all.relay.pair(EPOCH);
  await all.relay.hear(ready);
  await all.relay.agreed();
  return all;
}

test('a node that seals offers its key, agrees while it loads and answers sealed', async () => {
  const { relay, client, offer } = await node();
  assert.equal(offer.seal, hex(OURS.public));
  relay.pair(EPOCH);
  await relay.agreed();
  await relay.hear(ready);
  await relay.ask(7);
  await relay.hear(answered(7));
  const { seal, backbone, sealWhy } = client.status();
  assert.deepEqual([seal, backbone, sealWhy], ['sealed', FINGERPRINT, '']);
  client.leave('done');
});

test('a burst is answered in the order it came', async () => {
  const { relay, client } = await serving();
  const callIds = Array.from({ length: 30 }, (_, i) => i + 1);
  await relay.ask(...callIds);
  for (const callId of callIds) await relay.hear(answered(callId));
  assert.equal(relay.seal?.gaps, 0);
  client.leave('done');
});

test('a frame that was changed, repeated or stripped of its seal fails its call by name, and the next is answered', async () => {
  const { relay, client } = await serving();
  const changes = /** @type {[string, (data: Uint8Array<ArrayBuffer>) => Uint8Array<ArrayBuffer>[]][]} */ ([
    ['changed', (data) => [withByte(data, 50, data[50] ^ 1)]],
    ['repeated', (data) => [data, data]],
    ['stripped', (data) => [withByte(data, 4, 0)]],
  ]);
  let callId = 100;
  for (const [name, meddle] of changes) {
    relay.meddle = meddle;
    await relay.ask(++callId);
    const { code } = await relay.hear(answered(callId, 'Failure'));
    assert.equal(code, 'bad_seal', name);
    if (name === 'repeated') await relay.hear(answered(callId));
    relay.meddle = (data) => [data];
    await relay.ask(++callId);
    await relay.hear(answered(callId));
  }
  assert.equal(client.sealing.book.faults, 3);
  assert.equal(client.machine.state, 'SERVING');
  client.leave('done');
});

test('a plain dispatch of a backbone that seals is refused', async () => {
  const { relay, client } = await serving();
  relay.dispatch(5, [0]);
  assert.equal((await relay.hear(answered(5, 'Failure'))).code, 'bad_seal');
  client.leave('done');
});

test('a lost hello is said again', async () => {
  let now = 0;
  const { relay, client } = await node({ clock: () => now });
  relay.deaf = 1;
  relay.pair(EPOCH);
  await relay.hear((message) => message.type === 'SealHello');
  now += RESEND_S;
  client.onTimer();
  await relay.agreed();
  assert.equal(relay.hellos, 2);
  client.leave('done');
});

test('a page without keys works unsealed and says why', async () => {
  const { relay, client, offer } = await node({ identity: null });
  assert.equal(offer.seal, undefined);
  relay.pair(EPOCH);
  await relay.hear(ready);
  relay.dispatch(7, [0, 2]);
  await relay.hear(answered(7));
  assert.deepEqual([client.status().seal, client.status().sealWhy], ['unsealed', 'no WebCrypto']);
  client.leave('done');
});

test('a page with keys works for a backbone that does not seal and says so', async () => {
  const { relay, client } = await node();
  relay.assign(EPOCH, SLICES);
  await relay.hear(ready);
  relay.dispatch(7, [0, 2]);
  await relay.hear(answered(7));
  assert.deepEqual([client.status().seal, client.status().sealWhy], ['unsealed', 'the backbone does not seal']);
  client.leave('done');
});

for (const [name, pinned, seal, works] of /** @type {[string, string, string|undefined, boolean][]} */ ([
  ['the pinned key', FINGERPRINT.toUpperCase().replaceAll('-', ''), hex(THEIRS.public), true],
  ['another key', '0000-0000-0000-0000-0000', hex(THEIRS.public), false],
  ['no key', FINGERPRINT, undefined, false],
])) {
  test(`a page with a pinned key ${works ? 'works' : 'does not work'} for a backbone with ${name}`, async () => {
    const { relay, client } = await node({ pinned });
    if (seal === undefined) relay.assign(EPOCH, SLICES);
    else relay.pair(EPOCH, seal);
    if (works) {
      await relay.hear(ready);
      await relay.agreed();
      await relay.ask(1);
      await relay.hear(answered(1));
    } else {
      while (client.status().seal !== 'refused') await new Promise((then) => setTimeout(then, 1));
      assert.deepEqual([client.status().state, client.status().wanted], ['OFFERED', 0]);
      assert.match(client.status().sealWhy, /not the pinned/);
    }
    client.leave('done');
  });
}

test('what was said before leaving leaves first', async () => {
  const { relay, client } = await serving();
  await relay.ask(1, 2, 3);
  while (client.machine.counters.calls < 3) await new Promise((then) => setTimeout(then, 1));
  client.leave('done');
  for (const callId of [1, 2, 3]) await relay.hear(answered(callId));
  await relay.hear((message) => message.type === 'Bye');
});

// -- the passage alone

/** A book whose work takes as long as the first byte says. */
function slow() {
  const work = (/** @type {Uint8Array<ArrayBuffer>} */ data) =>
    data[0] === 0 ? data : new Promise((then) => setTimeout(then, data[0], data));
  return /** @type {any} */ ({ outgoing: work, incoming: work });
}

/** @param {any} book */
function passage(book) {
  /** @type {number[]} */
  const sent = [];
  /** @type {(number|string)[]} */
  const received = [];
  /** @type {string[]} */
  const stuck = [];
  const made = new SealedPassage(book, {
    send: (data) => sent.push(data[1]),
    receive: (data) => received.push(typeof data === 'string' ? data : data[1]),
    refuse: (frame, fault) => received.push(`${frame.type}: ${fault.why}`),
    stuck: (why) => stuck.push(why),
  });
  return { made, sent, received, stuck };
}

test('order is kept whatever takes long, and what needs nothing passes at once when nothing waits', async () => {
  const { made, sent, received } = passage(slow());
  made.outgoing(Uint8Array.of(0, 1));
  made.incoming(Uint8Array.of(0, 1).buffer);
  assert.deepEqual([sent, received], [[1], [1]], 'in the same turn');
  for (const [delay, number] of [[9, 2], [1, 3], [0, 4], [4, 5]]) {
    made.outgoing(Uint8Array.of(delay, number));
    made.incoming(Uint8Array.of(delay, number).buffer);
  }
  await new Promise((then) => made.afterSending(() => then(undefined)));
  assert.deepEqual(sent, [1, 2, 3, 4, 5]);
  while (received.length < 5) await new Promise((then) => setTimeout(then, 1));
  assert.deepEqual(received, [1, 2, 3, 4, 5]);
  assert.equal(made.waitingBytes, 0);
});

test('what came waits for keys that are being agreed on, and a fault does not stop the rest', async () => {
  const book = slow();
  const plain = encodeFrame({ type: FrameType.CANCEL, payload: new Uint8Array(0), peer: 1, callId: 1n });
  book.incoming = (/** @type {Uint8Array} */ data) => {
    if (data.length > 2) throw new SealFault('altered', 'no');
    return data;
  };
  const { made, received } = passage(book);
  /** @type {(value?: unknown) => void} */
  let agreed = () => {};
  made.hold(new Promise((then) => (agreed = then)));
  made.incoming(plain.buffer);
  made.incoming(Uint8Array.of(0, 8).buffer);
  await new Promise((then) => setTimeout(then, 3));
  assert.deepEqual(received, []);
  agreed();
  while (received.length < 2) await new Promise((then) => setTimeout(then, 1));
  assert.deepEqual(received, ['18: altered', 8]);
});

test('what waits is bounded', () => {
  const { made, stuck } = passage({ incoming: () => new Promise(() => {}) });
  const frame = new ArrayBuffer(MAX_WAITING_BYTES / 2);
  for (let i = 0; i < 4; i += 1) made.incoming(frame);
  assert.equal(stuck.length, 1);
});
