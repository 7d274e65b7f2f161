/**
 * Choose among the builds of the wasm kernel: those this browser accepts, that pass the known-answer test, the fastest.
 *
 *   validate -> test -> time every format a moment -> choose -> test again (warm code is other code)
 *
 * A build that gave a wrong answer once is never used again in this page, though it may pass now: V8 11.3 computes
 * `i32x4.relaxed_dot_i8x16_i7x16_add_s` wrongly in its baseline tier and rightly once the function is hot. When the last
 * build falls the device must not serve. All builds give the same bits, so a node may change its mind at any time.
 */
import { KernelFault, messageOf, Unreachable } from '../errors.js';
import { WasmKernel } from './wasm.js';

export const BUILDS = /** @type {const} */ (['relaxed16', 'relaxed32', 'plain']);
const MOMENT_MS = 6; // per format and build; 18 ms of timing a build
const MIN_LOOKS = 6; // though the machine be busy: the first ones run cold code
const HIDDEN_DIM = 512;
const EXPERT_DIM = 256;

/** What is timed: block bytes, columns, and where the f16 scales stand. */
const TIMED = [
  { type: 8, cols: 32, bytes: 34, scales: [0] },
  { type: 12, cols: 256, bytes: 144, scales: [0, 2] },
  { type: 14, cols: 256, bytes: 210, scales: [208] },
];

/** (func (result v128) (i8x16.relaxed_swizzle ...)): who takes this takes the relaxed builds. */
const RELAXED_PROBE = Uint8Array.of(
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 15, 1, 13, 0, 65, 1, 253, 15, 65, 2, 253, 15, 253, 128, 2, 11,
);

/** @typedef {(typeof BUILDS)[number]} Build */
/** @typedef {Record<number, number>} Speeds  GB of weights per second by ggml type, one row */

/** The builds of one page, and what is known of them. */
export class KernelBuilds {
  /** @param {(build: Build) => Promise<ArrayBuffer|Uint8Array>} read gives the bytes; throws Unreachable */
  constructor(read) {
    this.read = read;
    /** @type {Map<string, string>} build -> why it is out */
    this.out = new Map();
    /** @type {Map<Build, Speeds>} */
    this.speeds = new Map();
    /** @type {Map<Build, WebAssembly.Module>} */
    this.modules = new Map();
  }

  /**
   * Load the best build that is left. Throws KernelFault when none is, Unreachable when none could be had.
   * @param {{limitBytes?: number}} [options]
   * @returns {Promise<WasmKernel>}
   */
  async choose(options = {}) {
    const name = await this.best();
    try {
      const kernel = await WasmKernel.load(/** @type {WebAssembly.Module} */ (this.modules.get(name)), options);
      kernel.knownAnswerTest();
      return kernel;
    } catch (error) {
      this.drop(name, messageOf(error));
      return this.choose(options);
    }
  }

  /** The name of the best build that is left; `modules` has it compiled. @returns {Promise<Build>} */
  async best() {
    for (const build of BUILDS) {
      if (!this.out.has(build) && !this.speeds.has(build)) await this.try(build);
    }
    const left = [...this.speeds.keys()].filter((build) => !this.out.has(build));
    if (left.length === 0) {
      const reasons = [...this.out].map(([build, why]) => `${build}: ${why}`).join('; ');
      throw new KernelFault(`no build of the kernel works in this browser: ${reasons}`);
    }
    return left.reduce((a, b) => (this.score(b) > this.score(a) ? b : a));
  }

  /** Never use a build again. @param {string} build as named here or by the kernel itself @param {string} why */
  drop(build, why) {
    this.out.set(build.replace(/^wasm-/, ''), why);
  }

  /** @param {Build} build */
  async try(build) {
    if (build !== 'plain' && !WebAssembly.validate(RELAXED_PROBE)) {
      this.drop(build, 'no relaxed SIMD here');
      return;
    }
    let bytes;
    try {
      bytes = await this.read(build);
    } catch (error) {
      if (!(error instanceof Unreachable) || build === 'plain') throw error;
      return; // plain must be there; the others are tried again the next time
    }
    try {
      const module = await WebAssembly.compile(/** @type {BufferSource} */ (bytes));
      this.modules.set(build, module);
      const kernel = await WasmKernel.load(module);
      kernel.knownAnswerTest();
      this.speeds.set(build, time(kernel));
    } catch (error) {
      this.drop(build, messageOf(error));
    }
  }

  /** Speed over all formats: the geometric mean, so that no format counts for more. @param {Build} build */
  score(build) {
    const speeds = Object.values(/** @type {Speeds} */ (this.speeds.get(build)));
    return Math.exp(speeds.reduce((sum, speed) => sum + Math.log(speed), 0) / speeds.length);
  }
}

/** @param {WasmKernel} kernel @returns {Speeds} */
function time(kernel) {
  /** @type {Speeds} */
  const speeds = {};
  for (const { type, cols, bytes, scales } of TIMED) {
    const formula = {
      hidden_dim: HIDDEN_DIM, expert_dim: EXPERT_DIM, gate_type: type, up_type: type, down_type: type,
      activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
    };
    const slice = new Uint8Array(((3 * HIDDEN_DIM * EXPERT_DIM) / cols) * bytes);
    for (let i = 0; i < slice.length; i++) slice[i] = (i * 197) % 251;
    for (let block = 0; block < slice.length; block += bytes) for (const at of scales) slice.set([0, 0x14], block + at); // 2^-10
    const expert = kernel.pack(formula, slice);
    const x = Float32Array.from({ length: HIDDEN_DIM }, (_, i) => Math.sin(i));
    const call = {
      formula, numTokens: 1, x: new Uint8Array(x.buffer), encoding: 0, rowExponents: Int16Array.of(1), grid: 0, layerExponents: 20,
      counts: Uint16Array.of(1), experts: [expert], pickExpert: Uint16Array.of(0), pickWeight: Float32Array.of(1),
    };
    let runs = 1;
    let bestMs = Infinity; // of one run; several between two looks at a clock that may be coarse
    const end = performance.now() + MOMENT_MS;
    for (let look = 0; look < MIN_LOOKS || performance.now() < end; look++) {
      const started = performance.now();
      for (let run = 0; run < runs; run++) kernel.answer(call);
      const ms = performance.now() - started;
      if (ms > 0) bestMs = Math.min(bestMs, ms / runs);
      if (ms < 1) runs *= 2;
    }
    kernel.free(expert);
    speeds[type] = slice.length / Math.min(bestMs, 1000) / 1e6;
  }
  return speeds;
}
