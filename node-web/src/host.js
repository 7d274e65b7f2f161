/**
 * The kernel of a node and the experts it holds: fetched, verified, packed, computed with. A driver, and no session.
 *
 * What comes of the work is told as events of `node.js`. A kernel that computes on this thread has its call answered in
 * the turn in which the computation ends; others answer later.
 */

import { Downloads } from './download.js';
import { CallRefused, codeOf, KernelFault, messageOf, SliceFault, Unreachable } from './errors.js';
import { KernelMemoryFull } from './kernels/kernel.js';
import { backoffS } from './node.js';
import { answer, proveAndTime } from './work.js';

const TIMES_KEPT = 101; // the median of so many last calls is shown
const IDLE_S = 0.02; // after so long without a call nothing has piled up

/**
 * @typedef {import('./kernels/kernel.js').Kernel} Kernel
 * @typedef {import('./kernels/kernel.js').PackedExpert} PackedExpert
 * @typedef {import('./node.js').NodeEvent} NodeEvent
 * @typedef {import('./wire/messages.js').AssignLayer} AssignLayer
 *
 * @typedef {object} HostOptions
 * @property {(onLost: (experts: PackedExpert[], why: string) => void) => Promise<Kernel>} loadKernel  `onLost`: what the kernel lost
 * @property {(build: string, why: string) => boolean} [dropKernel]  a build failed its test; is there another to try?
 * @property {import('./store.js').Keeper} keeper
 * @property {(slice: string, signal: AbortSignal, from: number) => Promise<Response>} fetchSlice  `from`: the first byte that is missing
 * @property {(task: () => void) => void} [defer]  run in a later turn, after the messages that wait
 *
 * @typedef {object} Owner
 * @property {() => number} clock  seconds, monotonic
 * @property {() => number} random
 * @property {(event: NodeEvent) => void} tell
 * @property {(message: string, code: string) => void} fault  what the owner of the device may read
 * @property {(slice: string) => boolean} wants  is this slice still wanted?
 * @property {(ticket: number) => boolean} cancelled  is nobody waiting for this call any more?
 */

export class ExpertHost {
  /** @param {HostOptions} options @param {Owner} owner */
  constructor(options, owner) {
    this.options = options;
    this.owner = owner;
    this.defer = options.defer ?? deferByChannel();
    /** @type {Kernel|null} */
    this.kernel = null;
    /** @type {'untested'|'passed'|'failed'} */
    this.kernelTest = 'untested';
    this.testing = false;
    /** @type {Map<string, {packed: PackedExpert, sizeBytes: number}>} */
    this.held = new Map();
    /** @type {Map<number, AssignLayer>} */
    this.assigned = new Map();
    /** @type {Map<string, AbortController>} */
    this.fetches = new Map();
    this.downloads = new Downloads(options.fetchSlice, options.keeper, (data) => this.sha256(data), (part) => owner.wants(part.slice(0, 64)));
    this.computedAt = -Infinity;
    this.ranAt = 0; // Date.now() after the last computation: a long one is no sleep
    /** @type {number[]} */
    this.times = []; // ms of the last calls
  }

  get bytesIn() {
    return this.downloads.bytesIn;
  }

  get heldBytes() {
    return [...this.held.values()].reduce((sum, { sizeBytes }) => sum + sizeBytes, 0);
  }

  get medianMs() {
    const times = [...this.times].sort((a, b) => a - b);
    return times.length ? times[times.length >> 1] : null;
  }

  // --- slices

  /** Get, verify and pack one slice; the outcome goes to the machine. @param {import('./node.js').FetchSlice} wanted */
  async fetch({ slice, layer, sizeBytes }) {
    const { keeper } = this.options;
    const abort = new AbortController();
    this.fetches.set(slice, abort);
    const formula = this.assigned.get(layer)?.formula;
    const before = this.downloads.keptOf(slice);
    /** @type {Uint8Array|null} */
    let data = null;
    try {
      if (formula === undefined || this.kernel === null) throw new SliceFault(slice, 'its layer is not assigned', 'kernel');
      const kept = await keeper.read(slice);
      data = kept;
      if (data === null || data.length !== sizeBytes || (await this.sha256(data)) !== slice) {
        if (kept !== null) await keeper.remove(slice); // cut off, or rotten: never "exists, so ok"
        await keeper.room();
        data = await this.downloads.get(slice, sizeBytes, abort);
      }
      if (this.fetches.get(slice) !== abort) return; // stopped meanwhile
      this.free(slice);
      const kernel = this.kernel;
      const packed = kernel.pack(formula, data);
      const expert = packed instanceof Promise ? await packed : packed;
      if (this.fetches.get(slice) !== abort || kernel !== this.kernel) return kernel.free(expert);
      this.held.set(slice, { packed: expert, sizeBytes });
    } catch (error) {
      if (this.fetches.get(slice) !== abort) return;
      this.fetches.delete(slice);
      this.owner.fault(messageOf(error), codeOf(error));
      const progress = this.downloads.keptOf(slice) > before;
      this.owner.tell({ type: 'SliceFailed', slice, reason: messageOf(error), kind: kindOf(error), progress });
      if (error instanceof KernelFault) this.testKernel(); // no build is left, maybe
      return;
    }
    this.fetches.delete(slice);
    this.owner.tell({ type: 'SliceLoaded', slice, heldBytes: this.held.get(slice)?.packed.sizeBytes });
    keeper.write(slice, data, this.owner.wants); // serving does not wait for storage
  }

  /** @param {string} slice */
  stopFetch(slice) {
    this.fetches.get(slice)?.abort();
    this.fetches.delete(slice);
  }

  /** With the browser's own code where it has one: plain http pages have none. @param {Uint8Array} data @returns {Promise<string>} */
  async sha256(data) {
    const subtle = globalThis.crypto?.subtle;
    if (subtle === undefined) return /** @type {Kernel} */ (this.kernel).sha256(data);
    const digest = await subtle.digest('SHA-256', /** @type {Uint8Array<ArrayBuffer>} */ (data));
    return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, '0')).join('');
  }

  /** @param {string} slice */
  free(slice) {
    const held = this.held.get(slice);
    if (held === undefined) return;
    this.held.delete(slice);
    this.kernel?.free(held.packed);
  }

  // --- kernel

  async testKernel() {
    this.kernelTest = 'untested';
    if (this.testing) return; // the test under way will do
    this.testing = true;
    try {
      const tested = await this.#provenKernel();
      this.kernelTest = 'passed';
      this.owner.tell({ type: 'KernelTested', ...tested });
    } catch (error) {
      this.kernelTest = 'failed';
      this.owner.tell({ type: 'KernelFault', reason: messageOf(error) });
    } finally {
      this.testing = false;
    }
  }

  /** A kernel that passes its test: the one we have, else the next that is left. Throws what the last one failed with. */
  async #provenKernel() {
    for (let kernel = this.kernel ?? (await this.#loadKernel()); ; kernel = await this.#loadKernel()) {
      try {
        const gbPerS = await proveAndTime(kernel);
        if (this.kernel === null) this.lost([...this.held.values()].map(({ packed }) => packed), kernel);
        return { build: kernel.build, gbPerS };
      } catch (error) {
        this.owner.fault(messageOf(error), codeOf(error));
        this.kernel = null; // calls are refused until the next one has passed
        kernel.close?.();
        if (!this.options.dropKernel?.(kernel.build, messageOf(error))) throw error;
      }
    }
  }

  /**
   * The kernel no longer holds these, or another takes over: forget them, say so, and get them again.
   * @param {PackedExpert[]} experts
   * @param {Kernel|null} [kernel]
   */
  lost(experts, kernel = this.kernel) {
    this.kernel = kernel;
    const gone = new Set(experts);
    const slices = [...this.held].filter(([, { packed }]) => gone.has(packed)).map(([slice]) => slice);
    for (const slice of slices) this.held.delete(slice);
    if (slices.length) this.owner.tell({ type: 'SlicesLost', slices: slices.sort() });
  }

  /** The relay may be away just now: a network that fails says nothing about the kernel. @returns {Promise<Kernel>} */
  async #loadKernel() {
    for (let attempt = 0; ; attempt++) {
      try {
        return await this.options.loadKernel((experts, why) => {
          this.owner.fault(`${experts.length} experts lost: ${why}`, 'kernel_fault');
          this.lost(experts);
        });
      } catch (error) {
        if (!(error instanceof Unreachable)) throw error;
        this.owner.fault(error.message, error.code);
        await new Promise((resolve) => setTimeout(resolve, backoffS(attempt, this.owner.random()) * 1000));
      }
    }
  }

  // --- calls

  /**
   * Compute at once when idle; otherwise let the messages that piled up during the last computation in first, since
   * a Cancel or a Ping may be among them.
   * @param {number} ticket
   * @param {import('./node.js').Call} call
   */
  compute(ticket, call) {
    if (this.owner.clock() - this.computedAt > IDLE_S) this.#computeNow(ticket, call);
    else this.defer(() => this.#computeNow(ticket, call));
  }

  /** @param {number} ticket @param {import('./node.js').Call} call */
  #computeNow(ticket, call) {
    if (this.owner.cancelled(ticket)) {
      this.owner.tell({ type: 'CallComputed', ticket, result: null });
      return;
    }
    const started = performance.now();
    const ended = () => {
      this.computedAt = this.owner.clock();
      this.ranAt = Date.now();
    };
    const done = (/** @type {import('./wire/calls.js').Partial} */ result) => {
      ended();
      this.times.push(performance.now() - started);
      if (this.times.length > TIMES_KEPT) this.times.shift();
      this.owner.tell({ type: 'CallComputed', ticket, result });
    };
    const failed = (/** @type {unknown} */ error) => {
      ended();
      const code = error instanceof CallRefused ? error.code : 'kernel_fault';
      const message = messageOf(error).slice(0, 500);
      this.owner.fault(message, code);
      this.owner.tell({ type: 'CallFailed', ticket, code, message });
    };
    let result;
    try {
      const layer = this.assigned.get(call.layer);
      if (layer === undefined || this.kernel === null) throw new CallRefused('not_held', `layer ${call.layer} is not held`);
      result = answer(this.kernel, layer, this.held, call.body.dispatch);
    } catch (error) {
      return failed(error);
    }
    if (result instanceof Promise) result.then(done, failed);
    else done(result);
  }
}

/** A task for a later turn, without the 4 ms that timers take. @returns {(task: () => void) => void} */
function deferByChannel() {
  /** @type {(() => void)[]} */
  const tasks = [];
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => tasks.shift()?.();
  return (task) => {
    tasks.push(task);
    port2.postMessage(null);
  };
}

/** What a failed fetch means: a word of the table in `backbone/node/holdings.py`. @param {unknown} error @returns {import('./holdings.js').FailureKind} */
function kindOf(error) {
  if (error instanceof SliceFault) return error.kind;
  if (error instanceof KernelMemoryFull) return 'memory';
  if (error instanceof CallRefused) return 'slice';
  return error instanceof KernelFault ? 'kernel' : 'network';
}
