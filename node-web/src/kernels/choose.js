/**
 * Choose among the builds of the wasm kernel, for each format: those this browser accepts, that pass the known-answer
 * tests, the fastest.
 *
 *   compile the first -> test its core -> serve;  then compile the others, side by side
 *   the first slice of a format -> test the format in every build, let them race a moment -> choose -> test again, warm
 *
 * Warm code is other code, so whoever keeps a kernel tests it again from time to time. A build that gave a wrong answer
 * once is never used again in this page, though it may pass now: V8 11.3 computes `i32x4.relaxed_dot_i8x16_i7x16_add_s`
 * wrongly in its baseline tier and rightly once the function is hot. When the last build falls the device must not
 * serve. All builds give the same bits, so formats may live in different ones and a node may change its mind at any time.
 */
import { KernelFault, messageOf, Unreachable } from '../errors.js';
import { WasmKernel } from './wasm.js';

export const BUILDS = /** @type {const} */ (['relaxed16', 'relaxed32', 'plain']);
const RACE_MS = 20; // of all builds together, for one format
const MOST_MS = 60; // while one still gets faster: the first rounds run cold code
const LOOK_MS = 0.7; // as many answers as fit between two looks at a clock that may be coarse
const MIN_ROUNDS = 4;
const FASTER = 0.95;
const HIDDEN_DIM = 512;
const EXPERT_DIM = 256;
const BENIGN = 0x34; // a block of such bytes has finite, normal scales in every format

/** (func (result v128) (i8x16.relaxed_swizzle ...)): who takes this takes the relaxed builds. */
const RELAXED_PROBE = Uint8Array.of(
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 15, 1, 13, 0, 65, 1, 253, 15, 65, 2, 253, 15, 253, 128, 2, 11,
);

/** @typedef {(typeof BUILDS)[number]} Build */
/** @typedef {import('./kernel.js').Formula} Formula */

/** The builds of one page: what is known of them, and this thread's kernel of each. */
export class KernelBuilds {
  /** @param {(build: Build) => Promise<WebAssembly.Module>} compile throws Unreachable when the build could not be had */
  constructor(compile) {
    this.compile = compile;
    /** @type {Map<string, string>} build -> why it is out */
    this.out = new Map();
    /** @type {Map<Build, WebAssembly.Module>} */
    this.modules = new Map();
    /** @type {Map<Build, WasmKernel>} those that passed their test */
    this.kernels = new Map();
    /** @type {Map<Build, Promise<void>>} */
    this.coming = new Map();
    /** Whether every build has come, or cannot. */
    this.complete = false;
    /** @type {Map<string, Build>} weight formats -> the fastest build */
    this.choices = new Map();
    /** @type {Map<string, Map<Build, number>>} weight formats -> GB of weights per second, one row */
    this.speeds = new Map();
  }

  /**
   * Get one build, no more: the others would take the processor and the network from it. One that could not be had is asked for the next time.
   * @returns {Promise<Build>} the first that works; throws KernelFault when none does, Unreachable when none could be had
   */
  async open() {
    /** @type {unknown} */
    let away;
    this.complete = this.missing().length === 0;
    for (const build of BUILDS) {
      if (this.out.has(build)) continue;
      await this.bring(build).catch((error) => { away = error; });
      for (const left of this.left()) return left;
    }
    if (away !== undefined) throw away;
    return this.first();
  }

  /** Get the other builds, side by side: who chooses among them waits for it. Those that cannot be had are left out until the next open(). */
  async all() {
    if (this.complete) return;
    await Promise.all(this.missing().map((build) => this.bring(build).catch(() => {})));
    this.complete = true;
  }

  /** Builds that are neither here nor out. */
  missing() {
    return BUILDS.filter((build) => !this.out.has(build) && !this.modules.has(build));
  }

  /** Have a build, however many ask for it at once. @param {Build} build @returns {Promise<void>} throws Unreachable */
  bring(build) {
    if (this.modules.has(build)) return Promise.resolve();
    const come = this.coming.get(build) ?? this.get(build).finally(() => this.coming.delete(build));
    this.coming.set(build, come);
    return come;
  }

  /** @param {Build} build */
  async get(build) {
    if (build !== 'plain' && !WebAssembly.validate(RELAXED_PROBE)) return this.drop(build, 'no relaxed SIMD here');
    try {
      this.modules.set(build, await this.compile(build));
    } catch (error) {
      if (error instanceof Unreachable) throw error;
      this.drop(build, messageOf(error));
    }
  }

  /** Those that are left, in the order of BUILDS, each having passed its test in this thread. @returns {Generator<Build>} */
  *left() {
    for (const build of BUILDS) {
      if (!this.modules.has(build) || this.out.has(build)) continue;
      try {
        this.kernel(build);
      } catch (error) {
        this.drop(build, messageOf(error));
        continue;
      }
      yield build;
    }
  }

  /** The first build that is left. Throws KernelFault. @returns {Build} */
  first() {
    for (const build of this.left()) return build;
    const reasons = [...this.out].map(([build, why]) => `${build}: ${why}`).join('; ');
    throw new KernelFault(`no build of the kernel works in this browser: ${reasons}`);
  }

  /** This thread's kernel of a build, tested when it is new. Throws KernelFault. @param {Build} build */
  kernel(build) {
    let kernel = this.kernels.get(build);
    if (kernel === undefined) {
      kernel = WasmKernel.from(/** @type {WebAssembly.Module} */ (this.modules.get(build)));
      kernel.knownAnswerTest();
      this.kernels.set(build, kernel);
    }
    return kernel;
  }

  /** Never use a build again. @param {string} build as named here or by the kernel itself @param {string} why */
  drop(build, why) {
    const name = build.replace(/^wasm-/, '');
    if (!this.out.has(name)) this.out.set(name, why);
    this.kernels.delete(/** @type {Build} */ (name));
  }

  /**
   * The fastest build for the weight formats of a formula. The first time this takes some 50 ms.
   * @param {Formula} formula
   * @returns {Build} throws KernelFault when none is left, CallRefused when none can compute it
   */
  choice(formula) {
    const formats = [formula.gate_type, formula.up_type, formula.down_type].join('/');
    const chosen = this.choices.get(formats);
    if (chosen !== undefined && !this.out.has(chosen)) return chosen;
    const speeds = this.race(formula);
    const ranking = [...speeds].sort(([, a], [, b]) => b - a);
    for (const [build] of ranking) {
      try {
        this.kernel(build).prove(formula, true);
      } catch (error) {
        this.fell(build, error);
        continue;
      }
      this.choices.set(formats, build);
      this.speeds.set(formats, speeds);
      return build;
    }
    this.first(); // throws, unless a build came to life again meanwhile
    throw new KernelFault(`no build of the kernel computes the formats ${formats}`);
  }

  /** Test a formula in every build, then let them compute in turn: all get warm, and all feel what else the machine does. @param {Formula} formula @returns {Map<Build, number>} GB of weights per second, one row */
  race(formula) {
    /** @type {{build: Build, run: () => void, sizeBytes: number, bestMs: number, end: () => void}[]} */
    const racers = [];
    for (const build of this.left()) {
      try {
        const kernel = this.kernel(build);
        kernel.prove(formula);
        racers.push({ build, ...runner(kernel, formula), bestMs: Infinity });
      } catch (error) {
        this.fell(build, error);
      }
    }
    const started = performance.now();
    let roundsAlike = 0;
    for (let round = 0; racers.length > 1; round++) {
      const spentMs = performance.now() - started;
      if (round >= MIN_ROUNDS && (spentMs > MOST_MS || (spentMs > RACE_MS && roundsAlike > 1))) break;
      roundsAlike += 1;
      for (const racer of racers) {
        const ms = look(racer.run);
        if (ms < FASTER * racer.bestMs) roundsAlike = 0;
        racer.bestMs = Math.min(racer.bestMs, ms);
      }
    }
    for (const { end } of racers) end();
    return new Map(racers.map(({ build, sizeBytes, bestMs }) => [build, sizeBytes / bestMs / 1e6]));
  }

  /** A wrong answer puts a build out; anything else is no fault of it. @param {Build} build @param {unknown} error */
  fell(build, error) {
    if (!(error instanceof KernelFault)) throw error;
    this.drop(build, messageOf(error));
  }
}

/** Milliseconds that one run takes. @param {() => void} run */
function look(run) {
  const started = performance.now();
  for (let runs = 1; ; runs++) {
    run();
    const ms = performance.now() - started;
    if (ms > LOOK_MS) return ms / runs;
  }
}

/** One expert in the formats of a formula, and a row for it. @param {WasmKernel} kernel @param {Formula} formula */
function runner(kernel, { gate_type, up_type, down_type }) {
  /** @type {Formula} */
  const formula = {
    hidden_dim: HIDDEN_DIM, expert_dim: EXPERT_DIM, gate_type, up_type, down_type,
    activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
  };
  const slice = new Uint8Array(kernel.sliceBytes(formula)).fill(BENIGN);
  const expert = kernel.pack(formula, slice);
  const x = Float32Array.from({ length: HIDDEN_DIM }, (_, i) => Math.sin(i));
  const call = {
    formula, numTokens: 1, x: new Uint8Array(x.buffer), encoding: 0, rowExponents: Int16Array.of(1), grid: 0, layerExponents: 100,
    counts: Uint16Array.of(1), experts: [expert], pickExpert: Uint16Array.of(0), pickWeight: Float32Array.of(1),
  };
  return { run: () => kernel.answer(call), sizeBytes: slice.length, end: () => kernel.free(expert) };
}
