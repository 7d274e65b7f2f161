/**
 * The kernel of webgpu.wgsl on the browser's graphics device; mirrors backbone/experts/webgpu.py.
 *
 * Experts stay on the device as the blocks of the GGUF. A dispatch is one submission and one read back, which has a deadline.
 * The weighted outputs are put on the integer grid here, so partials combine as any other's do. It is a class of its own
 * (wasm/CONTRACT.md "WebGPU"): whoever needs exact bits does not ask this node.
 *
 * A device may be lost at any moment. Then what runs fails at once, `onLost` names the experts, and a new device is taken;
 * after MOST_LOSSES the kernel fails its test, and the page goes on with WebAssembly.
 */
import { CallRefused, KernelFault, messageOf } from '../errors.js';
import { PackedExpert } from './kernel.js';

/** @typedef {import('./kernel.js').Kernel} Kernel */
/** @typedef {import('./kernel.js').Formula} Formula */
/** @typedef {import('./kernel.js').Call} Call */
/** @typedef {import('./kernel.js').EncodedPartial} EncodedPartial */
/** @typedef {import('./wasm.js').WasmKernel} WasmKernel */
/** @typedef {any} Device  GPUDevice; TypeScript's own library has no WebGPU yet */

const BLOCK_OF_X = /** @type {Record<number, number>} */ ({ 0: 0, 1: 0, 8: 32, 12: 256, 14: 256, 39: 32 }); // 0: floats
const LAYOUT = /** @type {Record<number, [number, number]>} */ ({ 0: [1, 4], 1: [1, 2], 8: [32, 34], 12: [256, 144], 14: [256, 210], 39: [32, 17] });
const SAFE_BINDING_BYTES = 128 << 20;
export const TOLERANCE = 2 ** -10; // of the largest output of a row
const DEADLINE_MS = 10_000;
const MOST_LOSSES = 3;
const TILE = 4;
const WIDTH = 65535; // workgroups beside one another
const USAGE = { MAP_READ: 1, COPY_SRC: 4, COPY_DST: 8, UNIFORM: 64, STORAGE: 128 };

/** Name the first thing this kernel cannot compute, or null. @param {Formula} formula */
export function refusal(formula) {
  const { hidden_dim: d, expert_dim: f, gate_type: gate, up_type: up, down_type: down } = formula;
  if (gate === null) return 'the graphics kernel: experts without a gate';
  const format = [gate, up, down].find((type) => BLOCK_OF_X[type] === undefined);
  if (format !== undefined) return `the graphics kernel: format ${format}`;
  if (BLOCK_OF_X[gate] !== BLOCK_OF_X[up]) return 'the graphics kernel: gate and up of formats that want x differently';
  if (formula.activation !== 'silu' || formula.limit) return `the graphics kernel: activation ${formula.activation} with limit ${formula.limit}`;
  if (formula.weight_position !== 'after' || formula.biased || /** @type {any} */ (formula).scaled) {
    return 'the graphics kernel: router weights before the experts, biases or scales';
  }
  const most = Math.max(...[gate, up, down].map((type) => matrixBytes(type, d * f)));
  if (most + 8 > SAFE_BINDING_BYTES) return `the graphics kernel: a matrix of ${most} bytes; one binding holds ${SAFE_BINDING_BYTES}`;
  return null;
}

/** @param {number} type @param {number} count */
function matrixBytes(type, count) {
  const [block, bytes] = LAYOUT[type];
  return (count / block) * bytes;
}

class DeviceExpert extends PackedExpert {
  /** @param {any[]} buffers gate, up, down @param {number} sizeBytes */
  constructor(buffers, sizeBytes) {
    super(0, sizeBytes);
    this.buffers = buffers;
  }
}

/** @implements {Kernel} */
export class WebGpuKernel {
  build = 'webgpu';
  refusal = refusal;

  /**
   * @param {object} options
   * @param {WasmKernel} options.exact  checks slices, encodes partials, and is what the device is compared with
   * @param {string} options.wgsl
   * @param {(experts: PackedExpert[], why: string) => void} [options.onLost]
   * @param {any} [options.gpu]  navigator.gpu
   * @param {number} [options.deadlineMs]
   */
  static async open({ exact, wgsl, onLost = () => {}, gpu = /** @type {any} */ (globalThis.navigator)?.gpu, deadlineMs = DEADLINE_MS }) {
    const kernel = new WebGpuKernel(exact, wgsl, onLost, gpu, deadlineMs);
    await kernel.#open();
    return kernel;
  }

  /** @param {WasmKernel} exact @param {string} wgsl @param {(experts: PackedExpert[], why: string) => void} onLost @param {any} gpu @param {number} deadlineMs */
  constructor(exact, wgsl, onLost, gpu, deadlineMs) {
    this.exact = exact;
    this.parts = new Map(wgsl.split('\n//@ ').slice(1).map((part) => [part.slice(0, part.indexOf('\n')), part.slice(part.indexOf('\n') + 1)]));
    this.onLost = onLost;
    this.gpu = gpu;
    this.deadlineMs = deadlineMs;
    this.losses = 0;
    this.closed = false;
    /** @type {Set<DeviceExpert>} */
    this.experts = new Set();
    /** @type {Map<string, Promise<any>>} */
    this.pipelines = new Map();
    /** @type {Device} */
    this.device = null;
    /** @type {Promise<never>} */
    this.gone = new Promise(() => {});
    /** @type {Promise<void>} */
    this.ready = Promise.resolve();
  }

  get usedBytes() {
    return [...this.experts].reduce((sum, { sizeBytes }) => sum + sizeBytes, this.exact.usedBytes);
  }

  async #open() {
    const adapter = await this.gpu?.requestAdapter({ powerPreference: 'high-performance' });
    if (!adapter) throw new KernelFault('this browser offers no graphics device');
    const device = await adapter.requestDevice(); // the limits every device has
    this.device = device;
    this.pipelines.clear();
    this.gone = device.lost.then((/** @type {any} */ { message, reason }) => {
      throw new CallRefused('not_held', `the graphics device was lost: ${message || reason}`);
    });
    this.gone.catch((error) => this.#lost(device, messageOf(error)));
  }

  /** @param {Device} device @param {string} why */
  #lost(device, why) {
    if (this.closed || device !== this.device) return;
    this.losses += 1;
    this.ready = this.losses > MOST_LOSSES ? Promise.reject(new KernelFault(why)) : this.#open();
    this.ready.catch(() => {}); // whoever asks next hears of it
    const lost = [...this.experts];
    this.experts.clear();
    for (const expert of lost) expert.sizeBytes = 0;
    this.onLost(lost, why);
  }

  /** Wait for the device, but not for ever, and not for one that is gone. @template T @param {Promise<T>} promise @returns {Promise<T>} */
  async #inTime(promise) {
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    let timer;
    const { device } = this;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => {
        device.destroy(); // its `lost` tells everybody
        reject(new CallRefused('not_held', `the graphics device gave no answer within ${this.deadlineMs} ms`));
      }, this.deadlineMs);
    });
    try {
      return /** @type {T} */ (await Promise.race([promise, this.gone, late]));
    } finally {
      clearTimeout(timer);
    }
  }

  /** Compare with the exact kernel within the tolerance of the class. Throws KernelFault. */
  async knownAnswerTest() {
    this.exact.knownAnswerTest();
    for (const type of Object.keys(BLOCK_OF_X).map(Number)) {
      const error = await this.errorOf(type).catch((why) => { throw new KernelFault(messageOf(why)); });
      if (!(error <= TOLERANCE)) throw new KernelFault(`webgpu, format ${type}: off by ${error} of a row`);
    }
  }

  /** The largest difference from the exact kernel, as a share of the row's largest output. @param {number} type @param {number} [rows] @param {number} [seed] */
  async errorOf(type, rows = 7, seed = 1) {
    const { formula, slices, x } = sample(type, rows, seed);
    const call = {
      formula, numTokens: rows, x: new Uint8Array(x.buffer), encoding: 0, rowExponents: new Int16Array(rows).fill(1), grid: 0,
      layerExponents: 4, counts: new Uint16Array(rows).fill(2), experts: /** @type {PackedExpert[]} */ ([]),
      pickExpert: Uint16Array.from({ length: 2 * rows }, (_, i) => Math.floor((i * 7) / 3) % 3),
      pickWeight: Float32Array.from({ length: 2 * rows }, (_, i) => 0.1 + i / (2 * rows)),
    };
    const held = slices.map((slice) => this.exact.pack(formula, slice));
    const exact = Float64Array.from(this.exact.answer({ ...call, experts: held }), Number);
    held.forEach((expert) => this.exact.free(expert));
    const ours = await Promise.all(slices.map((slice) => this.pack(formula, slice)));
    const sums = Float64Array.from(await this.answer({ ...call, experts: ours }), Number);
    ours.forEach((expert) => this.free(expert));
    let worst = 0;
    for (let row = 0; row < rows; row++) {
      const part = exact.subarray(row * formula.hidden_dim, (row + 1) * formula.hidden_dim);
      const scale = part.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
      part.forEach((value, c) => { worst = Math.max(worst, Math.abs(sums[row * formula.hidden_dim + c] - value) / scale); });
    }
    return worst;
  }

  /** @param {Formula} formula @param {Uint8Array} slice @returns {Promise<PackedExpert>} */
  async pack(formula, slice) {
    const why = refusal(formula);
    if (why !== null) throw new CallRefused('bad_frame', why);
    this.exact.free(this.exact.pack(formula, slice)); // refuses what is not finite, or of another length
    await this.ready;
    const { hidden_dim: d, expert_dim: f, gate_type: gate, up_type: up, down_type: down } = formula;
    let at = 0;
    const buffers = [gate, up, down].map((type) => {
      const size = matrixBytes(/** @type {number} */ (type), d * f);
      const part = slice.slice(at, (at += size));
      return this.#buffer(part, USAGE.STORAGE, 8); // the shaders may read a word beyond
    });
    const expert = new DeviceExpert(buffers, slice.length);
    this.experts.add(expert);
    return expert;
  }

  /** @param {PackedExpert} expert */
  free(expert) {
    if (expert.sizeBytes === 0) return;
    expert.sizeBytes = 0;
    this.experts.delete(/** @type {DeviceExpert} */ (expert));
    for (const buffer of /** @type {DeviceExpert} */ (expert).buffers) buffer.destroy();
  }

  /** @param {Call} call @returns {Promise<EncodedPartial>} */
  async partial(call) {
    return this.exact.encodePartial(await this.answer(call), call.numTokens, call.formula.hidden_dim, call.grid);
  }

  /** The sums of a dispatch, [numTokens, hidden_dim]. @param {Call} call @returns {Promise<BigInt64Array>} */
  async answer(call) {
    const { formula, numTokens, counts, pickExpert, pickWeight } = call;
    const why = refusal(formula);
    if (why !== null) throw new CallRefused('bad_frame', why);
    const experts = /** @type {DeviceExpert[]} */ (call.experts);
    if (experts.some((expert) => expert.sizeBytes === 0)) throw new CallRefused('not_held', 'an expert of this call is gone');
    const rowOf = rowsOfPicks(call);
    if (pickExpert.some((index) => index >= experts.length)) throw new CallRefused('bad_frame', 'a pick names an expert that was not passed');
    if (!pickWeight.every(Number.isFinite)) throw new CallRefused('non_finite', 'router weights');
    if (counts.length !== numTokens || call.rowExponents.length !== numTokens) throw new CallRefused('bad_frame', `${numTokens} rows`);
    const x = wordsOfX(call, BLOCK_OF_X[formula.up_type]);
    const order = Uint32Array.from(pickExpert.keys()).sort((a, b) => pickExpert[a] - pickExpert[b] || a - b);
    await this.ready;
    const p = order.length ? await this.#compute(formula, x, experts, call, order, rowOf) : new Float32Array(0);
    return onGrid(p, order, rowOf, call);
  }

  /** @param {Uint8Array} data */
  sha256(data) {
    return this.exact.sha256(data);
  }

  close() {
    this.closed = true;
    this.device?.destroy();
    this.experts.clear();
  }

  /** @param {Uint8Array|Uint32Array|Float32Array} data @param {number} usage @param {number} [slack] */
  #buffer(data, usage, slack = 0) {
    const size = Math.ceil((data.byteLength + slack) / 4) * 4;
    const buffer = this.device.createBuffer({ size, usage: usage | USAGE.COPY_DST, mappedAtCreation: true });
    new Uint8Array(buffer.getMappedRange()).set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
    buffer.unmap();
    return buffer;
  }

  /** @param {string} name */
  #part(name) {
    const text = this.parts.get(name);
    if (text === undefined) throw new KernelFault(`webgpu.wgsl has no part "${name}"`);
    return text;
  }

  /** @param {number} type @param {string} name */
  #matrix(type, name) {
    return (this.#part(`format ${type}`) + this.#part(BLOCK_OF_X[type] ? 'matrix ints' : 'matrix floats')).replaceAll('$', name);
  }

  /** @param {'hidden'|'quantise'|'down'} stage @param {number[]} types @returns {Promise<any>} */
  #pipeline(stage, ...types) {
    const key = [stage, ...types].join(' ');
    let found = this.pipelines.get(key);
    if (found === undefined) {
      const packed = this.gpu.wgslLanguageFeatures?.has('packed_4x8_integer_dot_product');
      const head = this.#part('head') + this.#part(packed ? 'dot packed' : 'dot plain');
      const names = stage === 'hidden' ? ['gate_', 'up_'] : ['down_'];
      const code = stage === 'quantise' ? this.#part(stage)
        : head + types.map((type, i) => this.#matrix(type, names[i])).join('') + this.#part(stage);
      const module = this.device.createShaderModule({ code });
      found = this.device.createComputePipelineAsync({ layout: 'auto', compute: { module, entryPoint: 'main' } });
      this.pipelines.set(key, /** @type {Promise<any>} */ (found));
    }
    return /** @type {Promise<any>} */ (found);
  }

  /** Weighted outputs of the picks in `order`. @param {Formula} formula @param {{words: Uint32Array, perRow: number}} x @param {DeviceExpert[]} experts @param {Call} call @param {Uint32Array} order @param {Uint32Array} rowOf */
  async #compute(formula, x, experts, call, order, rowOf) {
    const { device } = this;
    const { hidden_dim: d, expert_dim: f, up_type: up, down_type: down } = formula;
    const gate = /** @type {number} */ (formula.gate_type);
    const hBlock = BLOCK_OF_X[down];
    const hWords = hBlock ? f / hBlock + f / 4 : f;
    const picks = order.length;
    const [hiddenStage, quantiseStage, downStage] = await this.#inTime(Promise.all([
      this.#pipeline('hidden', gate, up), hBlock ? this.#pipeline('quantise') : null, this.#pipeline('down', down),
    ]));
    if (device !== this.device) throw new CallRefused('not_held', 'the graphics device was lost');
    /** @type {any[]} */
    const temporary = [];
    const make = (/** @type {Uint8Array|Uint32Array|Float32Array} */ data, usage = USAGE.STORAGE) => {
      temporary.push(this.#buffer(data, usage));
      return temporary.at(-1);
    };
    const room = (/** @type {number} */ size, /** @type {number} */ usage) => {
      temporary.push(device.createBuffer({ size, usage }));
      return temporary.at(-1);
    };
    try {
      const rows = make(order.map((pick) => rowOf[pick]));
      const weights = make(Float32Array.from(order, (pick) => call.pickWeight[pick]));
      const xs = make(x.words);
      const hidden = room(picks * f * 4, USAGE.STORAGE);
      const ints = hBlock ? room(picks * hWords * 4, USAGE.STORAGE) : hidden;
      const out = room(picks * d * 4, USAGE.STORAGE | USAGE.COPY_SRC);
      const bad = make(new Uint32Array(1), USAGE.STORAGE | USAGE.COPY_SRC);
      const staging = room(picks * d * 4 + 4, USAGE.COPY_DST | USAGE.MAP_READ);
      const encoder = device.createCommandEncoder();
      const run = (/** @type {any} */ pipeline, /** @type {any[]} */ buffers, /** @type {number[]} */ params, /** @type {number} */ groups, depth = 1) => {
        const uniform = make(Uint32Array.from(params), USAGE.UNIFORM);
        const entries = [...buffers, uniform].map((buffer, binding) => ({ binding, resource: { buffer } }));
        const pass = encoder.beginComputePass();
        pass.setPipeline(pipeline);
        pass.setBindGroup(0, device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries }));
        pass.dispatchWorkgroups(Math.min(groups, WIDTH), Math.ceil(groups / WIDTH), depth);
        pass.end();
      };
      /** @type {[number, number, number][]} */
      const spans = [];
      for (let at = 0; at < picks; ) {
        const e = call.pickExpert[order[at]];
        let n = 1;
        while (at + n < picks && call.pickExpert[order[at + n]] === e) n++;
        spans.push([e, at, n]);
        at += n;
      }
      for (const [e, at, n] of spans) {
        const [g, u] = experts[e].buffers;
        run(hiddenStage, [g, u, xs, rows, hidden], [f, d, x.perRow, at, n, WIDTH, BLOCK_OF_X[up], 0], f, Math.ceil(n / TILE));
      }
      if (hBlock) run(quantiseStage, [hidden, ints, bad], [f, hBlock, (picks * f) / hBlock, WIDTH], (picks * f) / hBlock);
      for (const [e, at, n] of spans) {
        run(downStage, [experts[e].buffers[2], ints, weights, out], [d, f, hWords, at, n, WIDTH, hBlock, 0], d, Math.ceil(n / TILE));
      }
      encoder.copyBufferToBuffer(out, 0, staging, 0, picks * d * 4);
      encoder.copyBufferToBuffer(bad, 0, staging, picks * d * 4, 4);
      device.queue.submit([encoder.finish()]);
      await this.#inTime(staging.mapAsync(1));
      const data = staging.getMappedRange().slice(0);
      if (new Uint32Array(data)[picks * d]) throw new CallRefused('non_finite', 'hidden activations');
      return new Float32Array(data, 0, picks * d);
    } finally {
      for (const buffer of temporary) buffer.destroy();
    }
  }
}

/** The row of each pick. @param {Call} call */
function rowsOfPicks({ counts, pickExpert, pickWeight }) {
  const rows = Uint32Array.from(Array.from(counts).flatMap((count, row) => /** @type {number[]} */ (Array(count).fill(row))));
  if (rows.length !== pickExpert.length || rows.length !== pickWeight.length) throw new CallRefused('bad_frame', `${pickExpert.length} picks`);
  return rows;
}

/** Rows of x as the shaders read them. @param {Call} call @param {number} block @returns {{words: Uint32Array, perRow: number}} */
function wordsOfX({ x, encoding, numTokens, formula: { hidden_dim: d } }, block) {
  const bytes = x.slice(); // aligned
  if (encoding <= 1) {
    if (bytes.length !== numTokens * d * (encoding ? 2 : 4)) throw new CallRefused('bad_frame', `${bytes.length} bytes of x`);
    const floats = encoding ? Float32Array.from(new Uint16Array(bytes.buffer), halfToFloat) : new Float32Array(bytes.buffer);
    if (!floats.every(Number.isFinite)) throw new CallRefused('non_finite', 'x');
    return block ? rounded(floats, numTokens, d, block) : { words: new Uint32Array(floats.buffer), perRow: d };
  }
  if (block !== (encoding === 2 ? 32 : 256)) throw new CallRefused('bad_frame', 'x is in int8 blocks of another size than gate or up want');
  const perRow = d / block + d / 4; // d is a multiple of 32 here, so rows need no padding
  if (bytes.length !== numTokens * perRow * 4) throw new CallRefused('bad_frame', `${bytes.length} bytes of x`);
  const words = new Uint32Array(bytes.buffer);
  const floats = new Float32Array(bytes.buffer);
  const ints = new Int8Array(bytes.buffer);
  for (let row = 0; row < numTokens; row++) {
    const at = row * perRow;
    if (!floats.subarray(at, at + d / block).every(Number.isFinite)) throw new CallRefused('non_finite', 'scales of x');
    if (ints.subarray((at + d / block) * 4, (at + perRow) * 4).includes(-128)) throw new CallRefused('bad_frame', 'an activation of -128');
  }
  return { words, perRow };
}

/** Int8 blocks by the contract's rule. @param {Float32Array} x @param {number} rows @param {number} d @param {number} block */
function rounded(x, rows, d, block) {
  const blocks = d / block;
  const perRow = blocks + d / 4;
  const words = new Uint32Array(rows * perRow);
  const scales = new Float32Array(words.buffer);
  const ints = new Int8Array(words.buffer);
  for (let row = 0; row < rows; row++) {
    for (let b = 0; b < blocks; b++) {
      const part = x.subarray(row * d + b * block, row * d + (b + 1) * block);
      const most = part.reduce((a, value) => Math.max(a, Math.abs(value)), 0);
      if (most < 2 ** -100) continue;
      const scale = Math.fround(most / 127);
      const inverse = Math.fround(1 / scale);
      scales[row * perRow + b] = scale;
      part.forEach((value, c) => { ints[(row * perRow + blocks) * 4 + b * block + c] = roundToEven(Math.fround(value * inverse)); });
    }
  }
  return { words, perRow };
}

/** @param {number} value below 2^51 */
function roundToEven(value) {
  return value + 1.5 * 2 ** 52 - 1.5 * 2 ** 52;
}

/** @param {number} half */
function halfToFloat(half) {
  const sign = half & 0x8000 ? -1 : 1;
  const exponent = (half >> 10) & 31;
  const mantissa = half & 0x3ff;
  if (exponent === 31) return mantissa ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + mantissa / 1024) * 2 ** (exponent - 15) : mantissa * 2 ** -24);
}

/** Put outputs on the grid and add them up by row. @param {Float32Array} p @param {Uint32Array} order @param {Uint32Array} rowOf @param {Call} call */
function onGrid(p, order, rowOf, { formula: { hidden_dim: d }, numTokens, grid, layerExponents, rowExponents }) {
  const layer = typeof layerExponents === 'number' ? null : layerExponents;
  if ((grid === 1) !== (layer !== null) || (layer !== null && layer.length !== d)) throw new CallRefused('bad_frame', `grid ${grid}`);
  const sums = new BigInt64Array(numTokens * d);
  const steps = Float64Array.from({ length: d }, (_, c) => 2 ** ((grid ? 15 : 31) - (layer === null ? /** @type {number} */ (layerExponents) : layer[c])));
  order.forEach((pick, index) => {
    const row = rowOf[pick];
    const scale = 2 ** -rowExponents[row];
    for (let c = 0; c < d; c++) {
      const value = p[index * d + c];
      const n = roundToEven(value * (steps[c] * scale));
      if (!(Math.abs(n) < 2 ** 51)) {
        throw new CallRefused(Number.isFinite(value) ? 'grid_overflow' : 'non_finite', 'an output that does not fit the grid');
      }
      sums[row * d + c] += BigInt(n);
    }
  });
  return sums;
}

/** A small expert layer with tame scales, and rows for it. @param {number} type @param {number} rows @param {number} seed */
function sample(type, rows, seed) {
  let state = (seed * 2654435761 + type) >>> 0 || 1;
  const next = () => {
    state ^= state << 13; state ^= state >>> 17; state ^= state << 5;
    return state >>> 0;
  };
  const [d, f] = BLOCK_OF_X[type] === 256 ? [512, 256] : BLOCK_OF_X[type] ? [96, 64] : [64, 36];
  const formula = {
    hidden_dim: d, expert_dim: f, gate_type: type, up_type: type, down_type: type,
    activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
  };
  const [block, bytes] = LAYOUT[type];
  const slices = [0, 1, 2].map(() => {
    const slice = new Uint8Array((3 * d * f * bytes) / block);
    for (let i = 0; i < slice.length; i++) slice[i] = next() >>> 24;
    if (type === 0) new Float32Array(slice.buffer).forEach((_, i, all) => { all[i] = (next() - 2 ** 31) / 2 ** 33; });
    if (type === 1) new Uint16Array(slice.buffer).forEach((half, i, all) => { all[i] = (half & 0x8fff) | 0x2000; });
    for (let at = 0; type >= 8 && at < slice.length; at += bytes) {
      if (type === 39) slice[at] = 120 + (slice[at] & 7);
      else for (const scale of type === 14 ? [208] : type === 12 ? [0, 2] : [0]) slice.set([0, 0x14], at + scale); // 2^-10
    }
    return slice;
  });
  const x = Float32Array.from({ length: rows * d }, () => (next() - 2 ** 31) / 2 ** 31);
  return { formula, slices, x };
}
