/** A relay, a kernel and a store in one process, for the tests of the driver. */

import { createHash } from 'node:crypto';
import { MemoryTransport } from '../src/transports/memory.js';
import { encodeDispatch } from '../src/wire/calls.js';
import { decodeFrame, encodeFrame, FrameType } from '../src/wire/frames.js';
import { fromPayload, MESSAGE_TYPES, toPayload } from '../src/wire/messages.js';

export const FORMULA = /** @type {const} */ ({
  hidden_dim: 32, expert_dim: 32, gate_type: 8, up_type: 8, down_type: 8,
  activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
});
export const MODEL = '4d000000'.padEnd(64, '0');

/** @param {Uint8Array} data */
export const sha256 = (data) => createHash('sha256').update(data).digest('hex');

/** Answers with the sum of what the packed experts are worth: their first byte. @implements {Kernel} */
export class FakeKernel {
  build = 'fake';
  usedBytes = 0;
  fault = '';
  /** @type {number[]} the worth of the experts of each call */
  computed = [];
  /** What happens during a computation. @type {() => void} */
  during = () => {};

  knownAnswerTest() {
    if (this.fault) throw new Error(this.fault);
  }

  /** @param {unknown} _formula @param {Uint8Array} slice */
  pack(_formula, slice) {
    this.usedBytes += slice.length;
    return { address: slice[0], sizeBytes: slice.length };
  }

  /** @param {{sizeBytes: number}} expert */
  free(expert) {
    this.usedBytes -= expert.sizeBytes;
    expert.sizeBytes = 0;
  }

  /** @param {any} call @returns {any} */
  partial({ experts, numTokens, formula }) {
    const worth = experts.reduce((/** @type {number} */ sum, /** @type {any} */ expert) => sum + expert.address, 0);
    this.computed.push(worth);
    this.during();
    return { widths: new Uint8Array(numTokens).fill(4), data: new Uint8Array(numTokens * formula.hidden_dim * 4).fill(worth) };
  }

  /** @returns {any} */
  answer() {
    throw new Error('nodes ask for partials');
  }

  /** @returns {any} */
  encodePartial() {
    throw new Error('nodes ask for partials');
  }

  /** @param {Uint8Array} data */
  sha256(data) {
    return sha256(data);
  }
}
/** @typedef {import('../src/kernels/kernel.js').Kernel} Kernel */

/** The other end: understands control frames, says what it is told to. */
export class FakeRelay {
  constructor() {
    /** @type {any[]} every control message and call frame received, newest last */
    this.heard = [];
    /** @type {MemoryTransport|null} */
    this.end = null;
    this.refuse = false;
    this.sessions = 0;
    /** @type {(() => void)[]} */
    this.waiting = [];
    /** What a node's `connect` option wants. @param {import('../src/transports/transport.js').TransportHandlers} handlers */
    this.connect = (handlers) => {
      const near = new MemoryTransport(handlers);
      if (this.refuse) {
        queueMicrotask(() => handlers.onClosed(0, 'refused'));
        return near;
      }
      this.end = new MemoryTransport({
        onOpen: () => {},
        onMessage: (data) => this.received(new Uint8Array(/** @type {ArrayBuffer} */ (data))),
        onClosed: () => {},
      });
      MemoryTransport.join(near, this.end);
      return near;
    };
  }

  /** @param {Uint8Array} data */
  received(data) {
    const frame = decodeFrame(data);
    const control = Object.values(MESSAGE_TYPES).includes(frame.type);
    const message = control ? fromPayload(frame.type, frame.payload) : { type: 'Partial', payload: frame.payload };
    this.heard.push({ ...message, callId: Number(frame.callId) });
    if (message.type === 'Hello') {
      this.sessions += 1;
      this.say({ type: 'Welcome', session: 'a'.repeat(32), relay: 'fake', pingIntervalS: 10, maxFrameBytes: 2 ** 24 });
    }
    this.waiting.splice(0).forEach((wake) => wake());
  }

  /** @param {any} message */
  say(message) {
    const type = MESSAGE_TYPES[/** @type {keyof typeof MESSAGE_TYPES} */ (message.type)];
    this.end?.send(encodeFrame({ type, payload: toPayload(message) }));
  }

  /** Assign slices of layer 0. @param {number} epoch @param {Uint8Array[]} slices @param {import("../src/kernels/kernel.js").Formula} [formula] */
  assign(epoch, slices, formula = FORMULA) {
    const ids = slices.map(sha256);
    const experts = Object.fromEntries(ids.map((id, expert) => [expert, id]));
    const layer = { layer: 0, formula, grid: { x32: 12, x16: null }, sliceBytes: slices[0]?.length ?? 1, experts };
    this.say({ type: 'Assign', epoch, peer: 9, model: MODEL, layers: slices.length ? [layer] : [] });
  }

  /** @param {number} callId @param {number[]} experts @param {number} [epoch] */
  dispatch(callId, experts, epoch = 1) {
    const payload = encodeDispatch({
      modelTag: 0x4d, layer: 0, numTokens: 1, hiddenDim: 32, xEncoding: 2, grid: 0,
      rowExponents: Int16Array.of(0), counts: Uint16Array.of(experts.length), experts: Uint16Array.from(experts),
      weights: new Float32Array(experts.length).fill(1), x: new Uint8Array(36),
    });
    this.end?.send(encodeFrame({ type: FrameType.DISPATCH, payload, peer: 9, callId: BigInt(callId), epoch }));
  }

  /** @param {number} callId */
  cancel(callId) {
    const payload = new Uint8Array(0);
    this.end?.send(encodeFrame({ type: FrameType.CANCEL, payload, peer: 9, callId: BigInt(callId), epoch: 1 }));
  }

  /** Wait until something was heard. @param {(message: any) => boolean} wanted @returns {Promise<any>} */
  async hear(wanted) {
    for (;;) {
      const index = this.heard.findIndex(wanted);
      if (index >= 0) return this.heard.splice(index, 1)[0];
      await new Promise((wake) => this.waiting.push(() => wake(undefined)));
    }
  }
}

/** @typedef {import('../src/store.js').SliceStore} SliceStore */

/** A store in memory that can refuse. @implements {SliceStore} */
export class FakeStore {
  /** @readonly */
  kind = /** @type {const} */ ('opfs');
  /** @type {Map<string, Uint8Array>} */
  slices = new Map();
  roomBytes = Infinity;

  async list() {
    return new Map([...this.slices].map(([slice, data]) => [slice, data.length]));
  }

  /** @param {string} slice */
  async read(slice) {
    return this.slices.get(slice) ?? null;
  }

  /** @param {string} slice @param {Uint8Array} data */
  async write(slice, data) {
    if (data.length > this.roomBytes) return /** @type {const} */ ('full');
    this.roomBytes -= data.length;
    this.slices.set(slice, data.slice());
    return /** @type {const} */ ('kept');
  }

  /** @param {string} slice */
  async remove(slice) {
    this.roomBytes += this.slices.get(slice)?.length ?? 0;
    this.slices.delete(slice);
  }
}
