// Long frames come out as they went in; what is short passes them. The bytes are compared with Python's golden ones.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { RemoteProtocolError } from '../src/wire/errors.js';
import { encodeFrame, FrameType, MAX_MESSAGE_BYTES, PIECE_BYTES } from '../src/wire/frames.js';
import { NodeSession } from '../src/wire/session.js';
import { Assembler, cut, decodePiece, MAX_BYTES, SendQueue } from '../src/wire/pieces.js';

const GOLDEN = JSON.parse(readFileSync(new URL('../../tests/vectors/pieces.json', import.meta.url), 'utf8'));

/** @param {{type: number, size: number, call: number, fill: number}} what */
function made({ type, size, call, fill }) {
  const isCall = type >= FrameType.DISPATCH && type <= FrameType.ECHO;
  const ids = isCall ? { peer: 7, callId: BigInt(call), epoch: 3, deadlineMs: 500 } : {};
  return encodeFrame({ type, payload: new Uint8Array(size).fill(fill), ...ids });
}

test('messages leave in the order and with the heads of the golden scenarios, and come out whole', () => {
  for (const { name, steps } of GOLDEN.scenarios) {
    const queue = new SendQueue();
    const assembler = new Assembler();
    const sent = [];
    const found = [];
    for (const step of steps) {
      if (step.put) {
        queue.put(made(step.put));
        sent.push(made(step.put));
        continue;
      }
      const message = /** @type {Uint8Array<ArrayBuffer>} */ (queue.pop());
      assert.equal(Buffer.from(message.subarray(0, 44)).toString('hex'), step.pop.head, name);
      assert.equal(message.length, step.pop.size, name);
      assert.ok(message.length <= MAX_MESSAGE_BYTES);
      const whole = assembler.feed(message, 0);
      if (whole !== null) found.push(whole);
    }
    assert.ok(queue.empty && queue.pop() === null && assembler.sizeBytes === 0, name);
    const order = (/** @type {Uint8Array[]} */ frames) => frames.map((frame) => Buffer.from(frame).toString('latin1')).sort();
    assert.deepEqual(order(found), order(sent), name);
  }
});

test('a gap ends that call alone, in control the session', () => {
  const assembler = new Assembler();
  const call = made({ type: FrameType.PARTIAL, size: 3 * PIECE_BYTES, call: 1, fill: 1 });
  assert.equal(assembler.feed(cut(call, 0), 0), null);
  assert.equal(assembler.feed(cut(call, 2 * PIECE_BYTES), 0), null);
  assert.equal(assembler.sizeBytes, 0);
  const assign = made({ type: FrameType.ASSIGN, size: 3 * PIECE_BYTES, call: 0, fill: 32 });
  assembler.feed(cut(assign, 0), 0);
  assert.throws(() => assembler.feed(cut(assign, 2 * PIECE_BYTES), 0), RemoteProtocolError);
});

test('what stays unfinished is bounded', () => {
  const assembler = new Assembler();
  for (let call = 1; call < 200; call += 1) {
    const frame = made({ type: FrameType.DISPATCH, size: 40 * PIECE_BYTES, call, fill: 1 });
    for (let at = 0; at < 39; at += 1) assembler.feed(cut(frame, at * PIECE_BYTES), 0);
    assert.ok(assembler.sizeBytes <= MAX_BYTES + PIECE_BYTES);
  }
});

test('any piece is read or refused', () => {
  const good = cut(made({ type: FrameType.PARTIAL, size: PIECE_BYTES + 9, call: 1, fill: 1 }), PIECE_BYTES);
  for (let at = 0; at < good.length; at += 1) {
    for (const byte of [0, 1, 2, 17, 255]) {
      const bad = good.slice();
      bad[at] = byte;
      try {
        decodePiece(bad);
      } catch (error) {
        assert.ok(error instanceof RemoteProtocolError);
      }
    }
  }
});

test('bytes that move are a sign of life, a trickle is none', () => {
  for (const [bytes, lives] of /** @type {[number, boolean][]} */ ([[1, false], [20_000, true]])) {
    const session = new NodeSession(0);
    session.sendHello({ role: 'node', id: '1'.repeat(32), secret: '2'.repeat(32), token: null, agent: '', resume: false });
    const welcome = GOLDEN.welcome;
    session.receiveData(Uint8Array.from(Buffer.from(welcome, 'hex')), 0);
    for (let beat = 1; beat < 20 && session.nextTimer() !== null; beat += 1) session.handleTimer(Number(session.nextTimer()), beat * bytes);
    assert.equal(session.closed === null, lives);
  }
});
