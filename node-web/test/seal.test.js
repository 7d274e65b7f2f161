/** Seals, the page's end: the same bytes as in Python, and every change, repetition and stranger noticed. */

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { SealFault } from '../src/wire/errors.js';
import { decodeFrame, encodeFrame, FrameType, HEADER_BYTES } from '../src/wire/frames.js';
import {
  fingerprint, hex, KEY_FRAMES, linkSeal, newIdentity, NodeHandshake, sameFingerprint, Seal, SealBook, unhex, whyNoSeal,
} from '../src/wire/seal.js';

const VECTORS = JSON.parse(readFileSync(new URL('../../tests/vectors/seal.json', import.meta.url), 'utf8'));
const { epoch, node, backbone } = VECTORS;
const BACKBONE_AT = 2;

// RFC 8410: what stands before 32 private bytes in PKCS #8
const PKCS8 = { Ed25519: '302e020100300506032b657004220420', X25519: '302e020100300506032b656e04220420' };

/** @param {'Ed25519'|'X25519'} name @param {string} secret @param {string} publicKey @param {KeyUsage[]} usages */
async function keyPair(name, secret, publicKey, usages) {
  const privateKey = await crypto.subtle.importKey('pkcs8', unhex(PKCS8[name] + secret), name, false, usages);
  return { privateKey, publicKey: await crypto.subtle.importKey('raw', unhex(publicKey), name, true, []) };
}

async function begin() {
  const { privateKey } = await keyPair('Ed25519', node.seed, node.hello.identity, ['sign']);
  const identity = { key: privateKey, public: unhex(node.hello.identity) };
  const ephemeral = await keyPair('X25519', node.ephemeral_private, node.hello.ephemeral, ['deriveBits']);
  return NodeHandshake.begin(identity, epoch, unhex(backbone.answer.identity), ephemeral);
}

const answer = { type: /** @type {const} */ ('SealAnswer'), ...backbone.answer };

async function golden() {
  return (await begin()).finish(answer);
}

/** @param {Promise<unknown>} work @param {string} why */
async function refused(work, why) {
  await assert.rejects(work, (error) => error instanceof SealFault && error.why === why);
}

test('this machine can seal, a plain http page cannot', async () => {
  assert.equal(await whyNoSeal(), null);
  assert.match(String(await whyNoSeal(/** @type {any} */ ({}))), /plain http/);
  const old = { subtle: { generateKey: () => Promise.reject(new Error('no such algorithm')) } };
  assert.match(String(await whyNoSeal(/** @type {any} */ (old))), /Ed25519/);
});

test('golden hello is the one Python makes', async () => {
  const { hello } = await begin();
  assert.deepEqual(hello, { type: 'SealHello', ...node.hello });
  assert.equal(await fingerprint(unhex(node.hello.identity)), node.fingerprint);
  assert.ok(sameFingerprint(node.fingerprint, node.fingerprint.replaceAll('-', '').toUpperCase()));
});

test('golden frames are sealed and opened alike', async () => {
  const seal = await golden();
  const { link, key, frame, sealed } = VECTORS.link;
  assert.equal(hex(await (await linkSeal(link, unhex(key))).seal(unhex(frame))), sealed, 'on a link');
  for (const vector of VECTORS.sealed) {
    if (vector.from === 'node') {
      const type = parseInt(vector.frame.slice(6, 8), 16);
      const stream = seal.sealers[type === FrameType.FAILURE ? 'express' : 'bulk'];
      stream.counter = vector.counter;
      assert.equal(hex(await seal.seal(unhex(vector.frame))), vector.sealed, vector.name);
    } else assert.equal(hex(await seal.open(unhex(vector.sealed))), vector.frame, vector.name);
  }
});

test('golden breaches are refused by name and change nothing', async () => {
  const seal = await golden();
  for (const { name, sealed, why } of VECTORS.refused) {
    if (why === '') await seal.open(unhex(sealed));
    else await assert.rejects(seal.open(unhex(sealed)), (error) => error instanceof SealFault && error.why === why, name);
  }
  assert.equal(seal.openers.bulk.counter, 1);
});

test('an answer of another backbone, for another hello or changed on the way is refused', async () => {
  const handshake = await begin();
  await refused(handshake.finish({ ...answer, identity: node.hello.identity }), 'other_identity');
  await refused(handshake.finish({ ...answer, ephemeral: node.hello.ephemeral }), 'unsigned');
  await refused(handshake.finish({ ...answer, signature: '00'.repeat(64) }), 'unsigned');
  const again = await NodeHandshake.begin(await newIdentity(), epoch, unhex(backbone.answer.identity));
  await refused(again.finish(answer), 'unsigned');
});

/** Two seals that share keys, the second turned round: what a backbone would hold. */
async function pair() {
  const ours = await golden();
  const theirs = await golden();
  return { ours, theirs: new Seal(theirs.openers, theirs.sealers, theirs.derived) };
}

/** @param {number} callId @param {number} [sizeBytes] */
const dispatch = (callId, sizeBytes = 20) => {
  const payload = new Uint8Array(sizeBytes).fill(7);
  return encodeFrame({ type: FrameType.DISPATCH, payload, peer: BACKBONE_AT, callId: BigInt(callId), epoch, deadlineMs: 9 });
};

test('frames sealed side by side keep their counters, and the key changes between two of them', async () => {
  const { ours, theirs } = await pair();
  theirs.sealers.bulk.counter = KEY_FRAMES - 2;
  const sealed = await Promise.all([1, 2, 3, 4].map((callId) => theirs.seal(dispatch(callId))));
  for (const [i, data] of sealed.entries()) assert.deepEqual(await ours.open(data), dispatch(i + 1));
  assert.equal(ours.gaps, KEY_FRAMES - 2);
});

test('every byte but the peer is bound', async () => {
  const { ours, theirs } = await pair();
  const data = await theirs.seal(dispatch(1));
  for (let at = 16; at < data.length; at += 1) {
    const changed = data.slice();
    changed[at] ^= 0x40;
    await assert.rejects(ours.open(changed), SealFault, `byte ${at}`);
  }
  const moved = data.slice();
  moved[12] = 99;
  assert.equal(decodeFrame(await ours.open(moved)).peer, 99);
});

test('the book seals for its peer, refuses what came unsealed and lets the relay report failures', async () => {
  const { ours, theirs } = await pair();
  const book = new SealBook();
  assert.equal(book.outgoing(dispatch(1)).constructor, Uint8Array, 'no pairing yet');
  book.expect(BACKBONE_AT, epoch);
  assert.throws(() => book.incoming(dispatch(1)), (error) => error instanceof SealFault && error.why === 'unsealed');
  const failure = { type: 'Failure', message: '', phase: 'send', layer: null, expert: null };
  for (const code of ['gone', 'not_held']) {
    const payload = new TextEncoder().encode(JSON.stringify({ ...failure, code }));
    const data = encodeFrame({ type: FrameType.FAILURE, payload, peer: BACKBONE_AT, callId: 1n, epoch });
    if (code === 'gone') assert.equal(book.incoming(data), data);
    else assert.throws(() => book.incoming(data), SealFault);
  }
  const data = await theirs.seal(dispatch(1));
  assert.throws(() => book.incoming(data), (error) => error instanceof SealFault && error.why === 'no_key');
  book.put(BACKBONE_AT, epoch, ours);
  assert.deepEqual(await book.incoming(data), dispatch(1));
  await refused(/** @type {Promise<any>} */ (book.incoming(data)), 'repeated');
  assert.ok((await book.outgoing(dispatch(5))).length > dispatch(5).length);
  const other = encodeFrame({ type: FrameType.CANCEL, payload: new Uint8Array(0), peer: 77, callId: 1n, epoch });
  assert.equal(book.outgoing(other), other, 'nothing is agreed with that peer');
  assert.equal(book.faults, 4);
});

test('any bytes give a frame or a SealFault', async () => {
  const { ours } = await pair();
  const book = new SealBook();
  book.put(BACKBONE_AT, epoch, ours);
  let state = 1;
  const random = () => (state = (state * 48271) % 0x7fffffff);
  for (let round = 0; round < 300; round += 1) {
    const payload = Uint8Array.from({ length: 24 + (random() % 60) }, () => random() & 255);
    const data = encodeFrame({ type: FrameType.DISPATCH, payload, peer: BACKBONE_AT, callId: 1n, epoch, sealed: true });
    if (round % 3 === 0) for (let i = 0; i < 6; i += 1) data[random() % HEADER_BYTES] = random() & 255;
    try {
      await book.incoming(data);
    } catch (error) {
      assert.ok(error instanceof SealFault, String(error));
    }
  }
});
