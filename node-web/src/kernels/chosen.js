/**
 * A kernel on the caller's own thread that keeps every expert in the build that is fastest for its formats.
 *
 * When a build gives a wrong answer it is out, its experts are lost, and `onLost` names them, for whoever holds them to
 * pack them again: into the next build. Once no build is left, packing and testing throw KernelFault.
 */
import { CallRefused } from '../errors.js';
import { BuildFault } from './kernel.js';

const WARM_CALLS = 100; // then the engine has compiled the hot code anew, and it is tested again

/** @typedef {import('./kernel.js').Formula} Formula */
/** @typedef {import('./kernel.js').Kernel} Kernel */
/** @typedef {import('./kernel.js').Call} Call */
/** @typedef {import('./kernel.js').PackedExpert} PackedExpert */
/** @typedef {import('./choose.js').Build} Build */
/** @typedef {(experts: PackedExpert[], why: string) => void} OnLost */

/** @implements {Kernel} */
export class ChosenKernel {
  /** @param {import('./choose.js').KernelBuilds} builds opened @param {OnLost} [onLost] */
  constructor(builds, onLost = () => {}) {
    this.builds = builds;
    this.onLost = onLost;
    this.build = `wasm-${builds.first()}`;
    this.calls = 0;
    /** @type {Map<PackedExpert, Build>} */
    this.homes = new Map();
  }

  get usedBytes() {
    return [...this.builds.kernels.values()].reduce((sum, kernel) => sum + kernel.usedBytes, 0);
  }

  /** Every build in use. Throws KernelFault when none is left. */
  knownAnswerTest() {
    this.builds.first();
    for (const [build, kernel] of [...this.builds.kernels]) this.guarded(build, () => kernel.knownAnswerTest());
    this.build = `wasm-${this.builds.first()}`;
  }

  /** At once, unless some build is still on its way. @param {Formula} formula @param {Uint8Array} slice @param {boolean} [trial] @returns {PackedExpert|Promise<PackedExpert>} */
  pack(formula, slice, trial = false) {
    if (trial || this.builds.complete) return this.packNow(formula, slice, trial);
    return this.builds.all().then(() => this.packNow(formula, slice, false));
  }

  /** @param {Formula} formula @param {Uint8Array} slice @param {boolean} trial @returns {PackedExpert} */
  packNow(formula, slice, trial) {
    for (;;) {
      const build = trial ? this.builds.first() : this.builds.choice(formula);
      this.sweep();
      const packed = this.guarded(build, () => this.builds.kernel(build).pack(formula, slice));
      if (packed === null) continue;
      this.homes.set(packed, build);
      return packed;
    }
  }

  /** Get the builds that the first slice will be raced in. */
  prepare() {
    this.builds.all();
  }

  /** @param {PackedExpert} expert */
  free(expert) {
    const build = this.homes.get(expert);
    this.homes.delete(expert);
    if (build !== undefined) this.builds.kernels.get(build)?.free(expert);
  }

  /** @param {Call} call */
  partial(call) {
    const build = call.experts.length ? this.homes.get(call.experts[0]) : this.builds.first();
    if (build === undefined || call.experts.some((expert) => this.homes.get(expert) !== build)) {
      throw new CallRefused('not_held', 'an expert of this call is gone');
    }
    this.calls += 1;
    if (this.calls === WARM_CALLS) setTimeout(() => this.retest());
    return this.builds.kernel(build).partial(call);
  }

  /** @param {Uint8Array} data */
  sha256(data) {
    return this.builds.kernel(this.builds.first()).sha256(data);
  }

  /** Give all memory back. */
  close() {
    this.homes.clear();
    this.builds.kernels.clear();
  }

  /** Should no build be left, whoever packs what was lost learns it. */
  retest() {
    try {
      this.knownAnswerTest();
    } catch {
      this.sweep();
    }
  }

  /**
   * Null when the build turned out to compute wrongly: then it is out.
   * @template T
   * @param {Build} build
   * @param {() => T} task
   * @returns {T|null}
   */
  guarded(build, task) {
    try {
      return task();
    } catch (error) {
      if (!(error instanceof BuildFault)) throw error;
      this.builds.drop(build, error.message);
      this.sweep();
      return null;
    }
  }

  /** Experts in builds that are out are lost. */
  sweep() {
    const lost = [...this.homes].filter(([, build]) => this.builds.out.has(build)).map(([expert]) => expert);
    if (lost.length === 0) return;
    const why = this.builds.out.get(/** @type {Build} */ (this.homes.get(lost[0])));
    for (const expert of lost) {
      expert.sizeBytes = 0;
      this.homes.delete(expert);
    }
    this.onLost(lost, String(why));
  }
}
