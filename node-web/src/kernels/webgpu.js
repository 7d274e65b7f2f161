/**
 * The kernel on the browser's graphics device; mirrors backbone/experts/webgpu.py. The shaders are in webgpu/.
 *
 * Experts stay on the device as the blocks of the GGUF, in parts that fit a binding. A dispatch is one submission and one
 * read back, more when its picks are many. The weighted outputs are put on the integer grid here, so partials combine as
 * any other's do. It is a class of its own (wasm/CONTRACT.md "WebGPU"): whoever needs exact bits does not ask this node.
 *
 * A device may be lost at any moment (webgpu/device.js): calls fail, `onLost` names the experts, a new device is taken;
 * when there is none the kernel fails its test, and the page goes on with WebAssembly.
 */
import { CallRefused, KernelFault, messageOf } from '../errors.js';
import { KernelMemoryFull } from './kernel.js';
import { DEADLINE_MS, Graphics } from './webgpu/device.js';
import { BINDING_BYTES, FORMATS, READ_BEYOND, TILE, matrices, refusal, rowBytes, rowsPerPart } from './webgpu/formats.js';
import { DeviceExpert, Job, USAGE, bufferOf } from './webgpu/job.js';
import { addOnGrid, rowsOfPicks, rowsOfX } from './webgpu/rows.js';
import { sample, worstOf } from './webgpu/sample.js';

/** @typedef {import('./kernel.js').Kernel} Kernel */
/** @typedef {import('./kernel.js').PackedExpert} PackedExpert */
/** @typedef {import('./kernel.js').Formula} Formula */
/** @typedef {import('./kernel.js').Call} Call */
/** @typedef {import('./kernel.js').EncodedPartial} EncodedPartial */
/** @typedef {import('./wasm.js').WasmKernel} WasmKernel */
/** @typedef {import('./webgpu/device.js').Device} Device */
/** @typedef {import('./webgpu/job.js').Part} Part */
/** @typedef {import('./webgpu/job.js').Inputs} Inputs */

export const TOLERANCE = 2 ** -8; // of the largest output of a row: CONTRACT.md "WebGPU"
const CORE = [1, 8, 12]; // formats every test computes: floats, blocks of 32, blocks of 256
const SILU = /** @type {const} */ ({ activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false, scaled: false });

/** @implements {Kernel} */
export class WebGpuKernel {
  build = 'webgpu';

  /**
   * @param {object} options
   * @param {WasmKernel} options.exact  checks slices, encodes partials, and is what the device is compared with
   * @param {import('./webgpu/shaders.js').Read} options.read  gives a file of webgpu/ by its name
   * @param {(experts: PackedExpert[], why: string) => void} [options.onLost]
   * @param {any} [options.gpu]  navigator.gpu
   * @param {number} [options.deadlineMs]
   * @param {number} [options.bindingBytes]  the largest part of a matrix; smaller ones are for tests
   */
  static async open({ exact, read, onLost = () => {}, gpu = /** @type {any} */ (globalThis.navigator)?.gpu, deadlineMs = DEADLINE_MS, bindingBytes = BINDING_BYTES }) {
    const kernel = new WebGpuKernel(exact, onLost, bindingBytes);
    kernel.graphics = new Graphics(gpu, read, (why) => kernel.#lost(why), deadlineMs);
    await kernel.graphics.open();
    return kernel;
  }

  /** @param {WasmKernel} exact @param {(experts: PackedExpert[], why: string) => void} onLost @param {number} bindingBytes */
  constructor(exact, onLost, bindingBytes) {
    this.exact = exact;
    this.onLost = onLost;
    this.bindingBytes = bindingBytes;
    /** @type {Graphics} */
    this.graphics = /** @type {any} */ (null);
    /** @type {Set<DeviceExpert>} */
    this.experts = new Set();
    /** @type {Map<string, Promise<void>>} */
    this.proven = new Map(); // formulas, on this device
    /** @type {KernelFault|null} */
    this.wrong = null;
  }

  get device() {
    return this.graphics.device;
  }

  get usedBytes() {
    return [...this.experts].reduce((sum, { sizeBytes }) => sum + sizeBytes, this.exact.usedBytes);
  }

  /** @param {Formula} formula */
  refusal(formula) {
    return refusal(formula, this.bindingBytes);
  }

  /** @param {string} why */
  #lost(why) {
    const lost = [...this.experts];
    this.experts.clear();
    this.proven.clear(); // the next device may be another
    for (const expert of lost) expert.sizeBytes = 0;
    this.onLost(lost, why);
  }

  /** Compare with the exact kernel within the tolerance of the class; formulas follow when they are first used. Throws KernelFault. */
  async knownAnswerTest() {
    await this.exact.knownAnswerTest();
    if (this.wrong) throw this.wrong;
    this.proven.clear();
    for (const type of CORE) {
      await this.#prove({ ...SILU, hidden_dim: 0, expert_dim: 0, gate_type: type, up_type: type, down_type: type })
        .catch((why) => { throw why instanceof KernelFault ? why : new KernelFault(messageOf(why)); });
    }
  }

  /** The shaders of a formula are compared once per device, before it serves. @param {Formula} formula @returns {Promise<void>} */
  #prove(formula) {
    const key = JSON.stringify({ ...formula, hidden_dim: 0, expert_dim: 0 });
    let proof = this.proven.get(key);
    if (proof === undefined) {
      proof = this.errorOf(formula, TILE + 1).then((error) => {
        if (error <= TOLERANCE) return;
        this.wrong = new KernelFault(`webgpu, ${formula.activation} in formats ${[formula.gate_type, formula.up_type, formula.down_type]}: off by ${error} of a row`);
        throw this.wrong;
      });
      this.proven.set(key, proof);
      proof.catch(() => this.proven.delete(key));
    }
    return proof;
  }

  /** The largest difference from the exact kernel on a small expert, as a share of the row's largest output. @param {Formula} like @param {number} [rows] @param {number} [seed] */
  async errorOf(like, rows = 7, seed = 1) {
    const { formula, slices, x } = sample(like, rows, seed);
    const call = {
      formula, numTokens: rows, x: new Uint8Array(x.buffer), encoding: 0, rowExponents: new Int16Array(rows).fill(1), grid: 0,
      layerExponents: -8, counts: new Uint16Array(rows).fill(2), experts: /** @type {PackedExpert[]} */ ([]),
      pickExpert: Uint16Array.from({ length: 2 * rows }, (_, i) => Math.floor((i * 7) / 3) % 3),
      pickWeight: Float32Array.from({ length: 2 * rows }, (_, i) => 0.1 + i / (2 * rows)),
    };
    const held = slices.map((slice) => this.exact.pack(formula, slice));
    const exact = this.exact.answer({ ...call, experts: held });
    held.forEach((expert) => this.exact.free(expert));
    /** @type {DeviceExpert[]} */
    const ours = [];
    try {
      for (const slice of slices) ours.push(await this.#bring(formula, slice));
      return worstOf(await this.answer({ ...call, experts: ours }), exact, formula.hidden_dim);
    } finally {
      ours.forEach((expert) => this.free(expert));
    }
  }

  /** @param {Formula} formula @param {Uint8Array} slice @returns {Promise<PackedExpert>} */
  async pack(formula, slice) {
    const why = this.refusal(formula);
    if (why !== null) throw new CallRefused('bad_frame', why);
    await this.graphics.ready;
    await this.#prove(formula);
    return this.#bring(formula, slice);
  }

  /** Bring a slice to the device, in parts that fit a binding. @param {Formula} formula @param {Uint8Array} slice */
  async #bring(formula, slice) {
    this.exact.free(this.exact.pack(formula, slice)); // refuses what is not finite, or of another length
    await this.graphics.ready;
    const { device } = this;
    const sides = matrices(formula);
    let at = 0;
    const data = sides.map(({ type, rows, cols }) => slice.subarray(at, (at += rows * rowBytes(type, cols))));
    const extras = new Float32Array(slice.slice(at).buffer);
    const numScales = formula.scaled ? sides.length : 0;
    const scales = new Float32Array(3).fill(1);
    scales.set(extras.subarray(extras.length - numScales), 3 - numScales);
    device.pushErrorScope('out-of-memory');
    const parts = (/** @type {number} */ first, /** @type {number} */ last) => this.#parts(sides.slice(first, last), data.slice(first, last));
    /** @type {DeviceExpert} */
    let expert;
    try {
      const biases = bufferOf(device, extras, USAGE.STORAGE, 4);
      expert = new DeviceExpert(device, parts(0, -1), parts(sides.length - 1, sides.length), biases, scales, slice.length);
    } catch { // not even the browser's side of a buffer could be had
      device.popErrorScope().catch(() => {});
      throw new KernelMemoryFull(slice.length, this.usedBytes);
    }
    const failed = await this.graphics.inTime(device.popErrorScope());
    if (!this.#isHere(expert)) throw new CallRefused('not_held', 'the graphics device was lost');
    this.experts.add(expert);
    if (failed) {
      this.free(expert);
      throw new KernelMemoryFull(slice.length, this.usedBytes);
    }
    return expert;
  }

  /** @param {{type: number, rows: number, cols: number}[]} sides of the same number of rows @param {Uint8Array[]} data @returns {Part[]} */
  #parts(sides, data) {
    const step = Math.min(rowsPerPart(sides, this.bindingBytes), sides[0].rows);
    return Array.from({ length: Math.ceil(sides[0].rows / step) }, (_, i) => {
      const first = i * step;
      const rows = Math.min(step, sides[0].rows - first);
      const buffers = sides.map(({ type, cols }, side) => {
        const bytes = rowBytes(type, cols);
        return bufferOf(this.device, data[side].slice(first * bytes, (first + rows) * bytes), USAGE.STORAGE, READ_BEYOND);
      });
      return { first, rows, buffers };
    });
  }

  /** An expert may have outlived its device. @param {DeviceExpert} expert */
  #isHere(expert) {
    return expert.sizeBytes > 0 && this.graphics.alive && expert.device === this.device;
  }

  /** @param {PackedExpert} expert */
  free(expert) {
    if (expert.sizeBytes === 0) return;
    expert.sizeBytes = 0;
    const { hidden, down, biases } = /** @type {DeviceExpert} */ (expert);
    this.experts.delete(/** @type {DeviceExpert} */ (expert));
    for (const buffer of [...hidden, ...down].flatMap(({ buffers }) => buffers).concat(biases)) buffer.destroy();
  }

  /** @param {Call} call @returns {Promise<EncodedPartial>} */
  async partial(call) {
    return this.exact.encodePartial(await this.answer(call), call.numTokens, call.formula.hidden_dim, call.grid);
  }

  /** The sums of a dispatch, [numTokens, hidden_dim]. @param {Call} call @returns {Promise<BigInt64Array>} */
  async answer(call) {
    const { formula, numTokens, counts, pickExpert, pickWeight, grid, layerExponents: layer } = call;
    const { hidden_dim: d, expert_dim: f, gate_type: gate } = formula;
    const why = this.refusal(formula);
    if (why !== null) throw new CallRefused('bad_frame', why);
    const experts = /** @type {DeviceExpert[]} */ (call.experts);
    if (experts.some((expert) => expert.sizeBytes === 0)) throw new CallRefused('not_held', 'an expert of this call is gone');
    if (counts.length !== numTokens || call.rowExponents.length !== numTokens) throw new CallRefused('bad_frame', `${numTokens} rows`);
    if ((grid === 1) !== (typeof layer !== 'number') || (typeof layer !== 'number' && layer.length !== d)) throw new CallRefused('bad_frame', `grid ${grid}`);
    const rowOf = rowsOfPicks(call);
    if (pickExpert.some((index) => index >= experts.length)) throw new CallRefused('bad_frame', 'a pick names an expert that was not passed');
    if (!pickWeight.every(Number.isFinite)) throw new CallRefused('non_finite', 'router weights');
    /** @type {Inputs} */
    const inputs = { up: rowsOfX(call, FORMATS[formula.up_type].block) };
    if (gate !== null) inputs.gate = FORMATS[gate].block === FORMATS[formula.up_type].block ? inputs.up : rowsOfX(call, FORMATS[gate].block);
    const order = Uint32Array.from(pickExpert.keys()).sort((a, b) => pickExpert[a] - pickExpert[b] || a - b);
    const most = Math.max(1, Math.floor(this.bindingBytes / (4 * Math.max(d, f + f / 4)))); // picks whose outputs fit a binding
    const sums = new BigInt64Array(numTokens * d);
    for (let at = 0; at < order.length; at += most) {
      const picks = order.subarray(at, at + most);
      const rows = picks.map((pick) => rowOf[pick]);
      const p = await this.#compute(formula, inputs, experts, picks.map((pick) => pickExpert[pick]), rows, Float32Array.from(picks, (pick) => pickWeight[pick]));
      addOnGrid(sums, p, rows, call);
    }
    return sums;
  }

  /** @param {Uint8Array} data */
  sha256(data) {
    return this.exact.sha256(data);
  }

  close() {
    this.graphics.close();
    this.experts.clear();
  }

  /** Weighted outputs of picks that stand sorted by expert. @param {Formula} formula @param {Inputs} inputs @param {DeviceExpert[]} experts @param {Uint32Array} expertOf @param {Uint32Array} rows @param {Float32Array} weights */
  async #compute(formula, inputs, experts, expertOf, rows, weights) {
    const { graphics, device } = this;
    const [hidden, quantise, down, grids] = await graphics.inTime(Promise.all([
      graphics.pipeline('hidden', formula.gate_type, formula.up_type), graphics.pipeline('quantise'), graphics.pipeline('down', formula.down_type),
      graphics.grids(formula),
    ]));
    if (device !== this.device || !experts.every((expert) => this.#isHere(expert))) throw new CallRefused('not_held', 'the graphics device was lost');
    const job = new Job(device);
    device.pushErrorScope('validation');
    device.pushErrorScope('out-of-memory');
    try {
      const staging = job.submit([hidden, quantise, down], formula, inputs, experts, expertOf, rows, weights, grids);
      const [failed, wrong] = [device.popErrorScope(), device.popErrorScope()];
      const mapped = staging.mapAsync(1);
      mapped.catch(() => {});
      if (await graphics.inTime(failed)) throw new CallRefused('overloaded', 'the graphics device has no memory for this call');
      const error = await graphics.inTime(wrong); // a driver that refuses leaves zeros behind
      if (error) throw new KernelFault(`webgpu: ${error.message}`);
      await graphics.inTime(mapped);
      const data = staging.getMappedRange().slice(0);
      const count = rows.length * formula.hidden_dim;
      if (new Uint32Array(data)[count]) throw new CallRefused('non_finite', 'products or hidden activations');
      return new Float32Array(data, 0, count);
    } finally {
      job.end();
    }
  }
}
