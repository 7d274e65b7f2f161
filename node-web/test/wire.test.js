/** The wire in JavaScript: golden vectors shared with Python, a seeded fuzz of every decoder, the session's rules. */

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { decodeDispatch, decodePartialCall, decodeProbe, encodeDispatch, encodePartialCall, modelTag } from '../src/wire/calls.js';
import { clipReason, CloseCode, mayReconnect } from '../src/wire/close.js';
import { LocalProtocolError, RemoteProtocolError } from '../src/wire/errors.js';
import { decodeFrame, encodeFrame, FrameType, HEADER_BYTES, PAYLOAD_LIMITS } from '../src/wire/frames.js';
import { fromPayload, MESSAGE_TYPES, toPayload } from '../src/wire/messages.js';
import { HELLO_TIMEOUT_S, NodeSession, PING_INTERVAL_S } from '../src/wire/session.js';
import {
  decodePartial, decodeX, encodePartial, encodeX, Grid, quantiseRows, rowExponents, XEncoding,
} from '../src/wire/tensors.js';

const vectors = new URL('../../tests/vectors/', import.meta.url);
const FRAMES = JSON.parse(readFileSync(new URL('frames.json', vectors), 'utf8'));
const TENSORS = JSON.parse(readFileSync(new URL('tensors.json', vectors), 'utf8'));

/** @param {string} text */
const unhex = (text) => new Uint8Array(Buffer.from(text, 'hex'));
/** @param {Uint8Array} bytes */
const hex = (bytes) => Buffer.from(bytes).toString('hex');

/** Drop `type` and write keys in snake_case, as the wire does. @param {any} value @returns {any} */
function snake(value) {
  if (Array.isArray(value)) return value.map(snake);
  if (typeof value !== 'object' || value === null) return value;
  const entries = Object.entries(value).filter(([key]) => key !== 'type');
  return Object.fromEntries(entries.map(([k, v]) => [k.replace(/[A-Z]/g, (c) => `_${c.toLowerCase()}`), snake(v)]));
}

for (const vector of FRAMES.valid) {
  test(`golden frame is read and written alike: ${vector.name}`, () => {
    const data = unhex(vector.hex);
    const frame = decodeFrame(data);
    assert.equal(frame.type, vector.type);
    assert.equal(frame.payload.length, vector.length);
    assert.equal(frame.peer, vector.peer);
    assert.equal(frame.callId, BigInt(vector.call_id));
    assert.equal(frame.epoch, vector.epoch);
    assert.equal(frame.deadlineMs, vector.deadline_ms);
    assert.deepEqual(encodeFrame(frame), data);
    const { fields } = vector;
    if (vector.message === 'Dispatch') {
      const dispatch = decodeDispatch(frame.payload);
      assert.equal(dispatch.modelTag, fields.model_tag);
      assert.equal(dispatch.numTokens, fields.num_tokens);
      assert.deepEqual([...dispatch.rowExponents], fields.row_exponents);
      assert.deepEqual([...dispatch.counts], fields.counts);
      assert.deepEqual([...dispatch.experts], fields.experts);
      assert.deepEqual([...dispatch.weights], fields.weights);
      assert.equal(hex(dispatch.x), fields.x);
      assert.deepEqual(encodeDispatch(dispatch), new Uint8Array(frame.payload));
    } else if (vector.message === 'Partial') {
      const partial = decodePartialCall(frame.payload);
      const sums = decodePartial(partial.widths, partial.data, partial.hiddenDim, partial.grid);
      assert.deepEqual([...sums].map(String), fields.sums.flat());
      assert.equal(hex(partial.widths), fields.widths);
      assert.deepEqual(encodePartialCall(partial), new Uint8Array(frame.payload));
    } else if (vector.message === 'Probe') {
      assert.equal(decodeProbe(frame.payload), fields.answer_bytes);
    } else if (vector.message !== 'Cancel' && vector.message !== 'Echo') {
      const message = fromPayload(frame.type, frame.payload);
      assert.equal(message.type, vector.message);
      assert.deepEqual(snake(message), fields);
      assert.deepEqual(fromPayload(frame.type, toPayload(message)), message);
    }
  });
}

for (const vector of FRAMES.refused) {
  test(`golden breach closes with its code: ${vector.name}`, () => {
    const session = new NodeSession(0);
    session.receiveData(unhex(vector.hex), 0);
    const [closed] = session.events();
    assert.ok(closed.type === 'Closed' && closed.code === vector.close_code, JSON.stringify(closed));
    const data = unhex(vector.hex);
    assert.throws(() => {
      const frame = decodeFrame(data);
      fromPayload(frame.type, frame.payload);
    }, RemoteProtocolError);
  });
}

test('golden x is rounded alike', () => {
  for (const vector of TENSORS.x) {
    const x = new Float32Array(unhex(vector.x_f32).buffer);
    const encoded = encodeX(x, vector.hidden_dim, vector.encoding);
    assert.equal(hex(encoded), vector.encoded);
    assert.deepEqual([...rowExponents(x, vector.hidden_dim)], vector.row_exponents);
    const rows = decodeX(encoded, vector.num_tokens, vector.hidden_dim, vector.encoding);
    if (!(rows instanceof Float32Array)) assert.deepEqual(rows, quantiseRows(x, rows.block));
    else if (vector.encoding === XEncoding.F32) assert.deepEqual(rows, x);
    else assert.deepEqual(encodeX(rows, vector.hidden_dim, XEncoding.F16), encoded);
  }
});

test('golden partial is packed alike', () => {
  for (const vector of TENSORS.partials) {
    const sums = BigInt64Array.from(vector.sums, BigInt);
    const { widths, data } = encodePartial(sums, vector.hidden_dim, vector.grid);
    assert.equal(hex(widths), vector.widths);
    assert.equal(hex(data), vector.data);
    assert.deepEqual(decodePartial(widths, data, vector.hidden_dim, vector.grid), sums);
  }
});

test('every float16 comes back through encodeX and decodeX', () => {
  const all = Uint16Array.from({ length: 65536 }, (_, bits) => bits).filter((bits) => ((bits >> 10) & 31) !== 31);
  const bytes = new Uint8Array(all.buffer);
  const values = /** @type {Float32Array} */ (decodeX(bytes, 1, all.length, XEncoding.F16));
  assert.deepEqual(encodeX(values, all.length, XEncoding.F16), bytes);
});

test('sender refuses x that is not finite', () => {
  for (const encoding of Object.values(XEncoding)) {
    const x = new Float32Array(256).fill(1);
    x[7] = NaN;
    assert.throws(() => encodeX(x, 256, encoding), LocalProtocolError);
  }
  assert.throws(() => encodeX(new Float32Array(32).fill(70000), 32, XEncoding.F16), LocalProtocolError);
});

/** A small seeded generator (mulberry32), so that a failure can be repeated. @param {number} seed */
function random(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** @param {() => number} next @param {Uint8Array} data */
function mutate(next, data) {
  let out = data.slice();
  for (let n = 1 + Math.floor(next() * 3); n > 0 && out.length; n--) out[Math.floor(next() * out.length)] = next() * 256;
  if (next() < 0.3) out = out.slice(0, Math.floor(next() * (out.length + 1)));
  if (next() < 0.1) out = Uint8Array.from([...out, ...out.subarray(0, 9)]);
  return out;
}

/** @param {() => unknown} decode */
function onlyRemoteProtocolError(decode) {
  try {
    decode();
  } catch (error) {
    assert.ok(error instanceof RemoteProtocolError, String(error));
  }
}

test('any bytes give a message or a RemoteProtocolError, from every decoder', () => {
  const next = random(20261129);
  const seeds = FRAMES.valid.map((/** @type {any} */ vector) => unhex(vector.hex));
  for (let round = 0; round < 20_000; round++) {
    const data = mutate(next, seeds[Math.floor(next() * seeds.length)]);
    onlyRemoteProtocolError(() => decodeFrame(data));
    const payload = data.slice(HEADER_BYTES); // as if the header had been right
    const type = data[3];
    if (Object.values(MESSAGE_TYPES).includes(type)) onlyRemoteProtocolError(() => fromPayload(type, payload));
    onlyRemoteProtocolError(() => {
      const { x, numTokens, hiddenDim, xEncoding } = decodeDispatch(payload);
      decodeX(x, numTokens, hiddenDim, xEncoding);
    });
    onlyRemoteProtocolError(() => {
      const partial = decodePartialCall(payload);
      decodePartial(partial.widths, partial.data, partial.hiddenDim, partial.grid);
    });
  }
});

test('any messages give events and never an exception', () => {
  const next = random(7);
  const seeds = FRAMES.valid.map((/** @type {any} */ vector) => unhex(vector.hex));
  for (let round = 0; round < 3_000; round++) {
    const session = next() < 0.5 ? ready() : new NodeSession(100);
    for (let n = 0; n < 4; n++) {
      const seed = seeds[Math.floor(next() * seeds.length)];
      session.receiveData(next() < 0.5 ? mutate(next, seed) : seed, 100);
    }
    const events = session.events();
    const closed = events.findIndex((event) => event.type === 'Closed');
    assert.ok(closed === -1 || closed === events.length - 1);
  }
});

const HELLO = /** @type {const} */ ({
  role: 'node', id: '11'.repeat(16), secret: '22'.repeat(16), token: null, agent: 'test', resume: false,
});
const OFFER = {
  kernel: 'wasm-plain', memoryBytes: 2 ** 30, gbPerS: 1.5, battery: null, metered: false, name: 'phone', inventory: [],
};

/** @param {import('../src/wire/messages.js').ControlMessage} message */
function control(message) {
  return encodeFrame({ type: MESSAGE_TYPES[message.type], payload: toPayload(message) });
}

/** A session that was greeted and has offered, at time 100. */
function ready() {
  const session = new NodeSession(100);
  session.sendHello(HELLO);
  const welcome = { session: '33'.repeat(16), relay: 'test', pingIntervalS: PING_INTERVAL_S, maxFrameBytes: 1 << 24 };
  session.receiveData(control({ type: 'Welcome', ...welcome }), 100);
  session.sendOffer(OFFER);
  session.events();
  session.dataToSend();
  return session;
}

test('node is greeted, offers and is assigned', () => {
  const session = new NodeSession(100);
  session.sendHello(HELLO);
  assert.deepEqual(session.dataToSend().map((data) => decodeFrame(data).type), [FrameType.HELLO]);
  assert.equal(session.state, 'greeting');
  assert.throws(() => session.sendOffer(OFFER), LocalProtocolError);
  const other = ready();
  const assign = /** @type {const} */ ({ type: 'Assign', epoch: 7, peer: 2, model: null, layers: [] });
  other.receiveData(control({ ...assign, layers: [] }).buffer, 101);
  assert.deepEqual(other.events(), [assign]);
});

test('node answers a dispatch', () => {
  const session = ready();
  const call = FRAMES.valid.find((/** @type {any} */ vector) => vector.message === 'Dispatch');
  session.receiveData(unhex(call.hex), 101);
  const [event] = session.events();
  assert.ok(event.type === 'DispatchReceived');
  const sums = new BigInt64Array(event.dispatch.hiddenDim).fill(-5n);
  const rows = encodePartial(sums, event.dispatch.hiddenDim, Grid.X32);
  const partial = { layer: 3, hiddenDim: event.dispatch.hiddenDim, grid: Grid.X32, computeUs: 9, ...rows };
  session.sendPartial(event.peer, event.callId, event.epoch, partial);
  const [data] = session.dataToSend();
  const frame = decodeFrame(data);
  assert.equal(frame.callId, event.callId);
  assert.equal(decodePartialCall(frame.payload).computeUs, 9);
});

test('node survives a corrupt dispatch and names the call', () => {
  const session = ready();
  session.receiveData(encodeFrame({ type: FrameType.DISPATCH, payload: new Uint8Array(3), peer: 5, callId: 9n }), 101);
  const [event] = session.events();
  assert.ok(event.type === 'CorruptReceived' && event.callId === 9n && event.peer === 5);
  assert.equal(session.state, 'ready');
});

test('text message closes the session and what follows is discarded', () => {
  const session = ready();
  session.receiveData('hello', 101);
  const [closed] = session.events();
  assert.ok(closed.type === 'Closed' && closed.code === CloseCode.PROTOCOL && !closed.byPeer);
  assert.deepEqual(session.dataToSend().map((data) => decodeFrame(data).type), [FrameType.BYE]);
  session.receiveData(control({ type: 'Ping', t: 1 }), 102);
  session.receiveClose(1006);
  assert.deepEqual(session.events(), []);
  assert.throws(() => session.sendPause(true), LocalProtocolError);
  assert.equal(session.nextTimer(), null);
});

test('node gives up on a relay that does not answer', () => {
  const session = new NodeSession(100);
  session.sendHello(HELLO);
  assert.equal(session.nextTimer(), 100 + HELLO_TIMEOUT_S);
  session.handleTimer(100 + HELLO_TIMEOUT_S);
  assert.equal(session.closed?.code, CloseCode.TIMEOUT);
});

test('silence is noticed within two beats, and a relay that answers is measured', () => {
  const answered = ready();
  answered.handleTimer(110);
  answered.dataToSend();
  answered.receiveData(control({ type: 'Pong', t: 110_000 }), 110.05);
  assert.ok(Math.abs(/** @type {number} */ (answered.rttMs) - 50) < 1e-6);
  const silent = ready();
  for (let i = 0; i < 2; i++) silent.handleTimer(/** @type {number} */ (silent.nextTimer()));
  assert.equal(silent.closed?.reason, 'nothing heard for 20.0 s');
});

test('a session asked whether it lives is given up sooner, or goes on', () => {
  for (const answered of [false, true]) {
    const session = ready();
    session.checkAlive(103, 3);
    assert.equal(session.dataToSend().length, 1);
    if (answered) session.receiveData(control({ type: 'Pong', t: 103_000 }), 103.1);
    assert.equal(session.nextTimer(), 106);
    session.handleTimer(106);
    assert.equal(session.closed === null, answered);
  }
  const stranger = new NodeSession(100);
  stranger.checkAlive(103, 3);
  assert.equal(stranger.dataToSend().length, 0);
});

test('calls still flow while draining', () => {
  const session = ready();
  session.receiveData(control({ type: 'Drain', reason: 'restart', reconnectAfterS: 0.5 }), 101);
  assert.equal(session.state, 'draining');
  session.sendFailure(5, 9n, 1, { code: 'not_held', message: '', phase: 'queue', layer: null, expert: null });
  assert.equal(session.dataToSend().length, 1);
});

test('small things: tags, limits, close codes', () => {
  assert.equal(modelTag('01020304' + '0'.repeat(56)), 0x04030201);
  assert.equal(PAYLOAD_LIMITS.get(FrameType.CANCEL), 0);
  assert.ok(mayReconnect(1006) && !mayReconnect(CloseCode.AUTH));
  assert.equal(clipReason('ü'.repeat(100)), 'ü'.repeat(61));
  assert.throws(() => toPayload({ type: 'Ping', t: NaN }), LocalProtocolError);
});
