/**
 * A kernel of several workers, each with a memory of its own: more cores, no shared memory, no headers needed for it.
 *
 * An expert lives in one worker. A dispatch is cut by expert: every worker computes the picks of the experts it holds,
 * and the partials are added here. They are integers, so it does not matter who computed what, nor in which order. New
 * experts go where the fewest bytes are: neighbours of a layer end up in different workers, so a dispatch finds them all.
 *
 * A worker that dies, or says nothing for too long, takes its experts with it and nothing else: its calls fail, a new
 * worker takes its place, and `onLost` names the experts, for whoever holds them to pack them again.
 */
import { CallRefused, KernelFault } from '../errors.js';
import { BuildFault, KernelMemoryFull, PackedExpert } from './kernel.js';

const SILENT_MS = 20_000; // with work to do: the largest dispatch takes a slow phone less
const WARM_CALLS = 100; // then the engine has compiled the hot code anew, and it is tested again
const MOST_DEATHS = 6; // then the device cannot carry so many workers; those that live go on

/** @typedef {import('./choose.js').Build} Build */
/** @typedef {import('./choose.js').KernelBuilds} KernelBuilds */
/** @typedef {import('./kernel.js').Formula} Formula */
/** @typedef {import('./kernel.js').Call} Call */
/** @typedef {import('./kernel.js').EncodedPartial} EncodedPartial */
/** @typedef {{ postMessage(message: any, transfer?: any): void, terminate(): void, onmessage: any, onerror: any }} WorkerLike */
/** @typedef {{ resolve: (result: any) => void, reject: (error: Error) => void, since: number }} Waiting */

/** An expert of a pool: where it lives, beside what its worker calls it. */
class PooledExpert extends PackedExpert {
  /** @param {Member} member @param {Build} build @param {number} address @param {number} sizeBytes */
  constructor(member, build, address, sizeBytes) {
    super(address, sizeBytes);
    this.member = member;
    this.build = build;
  }
}

/** One worker and what it was asked. */
class Member {
  /** @param {PoolKernel} pool @param {WorkerLike} worker */
  constructor(pool, worker) {
    this.pool = pool;
    this.worker = worker;
    this.dead = false;
    this.usedBytes = 0;
    this.heardAt = 0;
    this.ids = 0;
    /** @type {Map<number, Waiting>} */
    this.waiting = new Map();
    /** @type {Set<PooledExpert>} */
    this.experts = new Set();
    worker.onmessage = (/** @type {{data: any}} */ { data }) => this.answered(data);
    worker.onerror = (/** @type {any} */ event) => {
      event.preventDefault?.();
      pool.bury(this, event.message ?? 'the worker failed');
    };
  }

  /** @param {any} message @param {any[]} [transfer] @returns {Promise<any>} */
  ask(message, transfer = []) {
    if (this.dead) return Promise.reject(new CallRefused('not_held', 'the worker that held this expert is gone'));
    const id = message.type === 'load' ? 0 : (this.ids += 1);
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject, since: performance.now() });
      this.worker.postMessage({ ...message, id }, transfer);
      this.pool.watch();
    });
  }

  /** @param {{id: number, result?: any, error?: {code: string, message: string, size: [number, number]|null, build: string|null}}} answer */
  answered({ id, result, error }) {
    this.heardAt = performance.now();
    const waiting = this.waiting.get(id);
    this.waiting.delete(id);
    if (waiting === undefined) return;
    if (error === undefined) waiting.resolve(result);
    else if (error.size) waiting.reject(new KernelMemoryFull(...error.size));
    else if (error.build) waiting.reject(new BuildFault(error.build, error.message));
    else waiting.reject(error.code === 'kernel_fault' ? new KernelFault(error.message) : new CallRefused(error.code, error.message));
  }

  /** Has it had work for too long without a word? @param {number} now */
  silent(now) {
    const since = Math.min(...[...this.waiting.values()].map((waiting) => waiting.since));
    return this.waiting.size > 0 && now - Math.max(since, this.heardAt) > this.pool.silentMs;
  }
}

/** Like `Kernel` (kernel.js), but what takes time gives promises. */
export class PoolKernel {
  /**
   * @param {object} options
   * @param {KernelBuilds} options.builds opened
   * @param {number} options.count workers
   * @param {number} [options.limitBytes] of each worker's memory
   * @param {() => WorkerLike} options.spawn opens one pool-worker.js
   * @param {(experts: PackedExpert[], why: string) => void} [options.onLost]
   * @param {number} [options.silentMs]
   * @returns {Promise<PoolKernel>} once every worker has passed its known-answer test; throws KernelFault
   */
  static async open({ builds, count, limitBytes, spawn, onLost = () => {}, silentMs = SILENT_MS }) {
    const pool = new PoolKernel(builds, { limitBytes }, spawn, onLost, silentMs);
    try {
      await Promise.all(Array.from({ length: count }, () => pool.hire()));
    } catch (error) {
      pool.close();
      throw error;
    }
    return pool;
  }

  /**
   * @param {KernelBuilds} builds chooses; its kernels in this thread add partials, hash slices, and hold no experts
   * @param {{limitBytes?: number}} load
   * @param {() => WorkerLike} spawn
   * @param {(experts: PackedExpert[], why: string) => void} onLost
   * @param {number} silentMs
   */
  constructor(builds, load, spawn, onLost, silentMs) {
    this.builds = builds;
    this.load = load;
    this.spawn = spawn;
    this.onLost = onLost;
    this.silentMs = silentMs;
    this.build = `wasm-${builds.first()}`;
    this.calls = 0;
    this.deaths = 0;
    this.closed = false;
    /** @type {Member[]} those that passed their test */
    this.members = [];
    /** @type {Set<Member>} those that are loading */
    this.novices = new Set();
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    this.timer = undefined;
  }

  /** This thread's kernel. Throws KernelFault when no build is left. */
  get adder() {
    return this.builds.kernel(this.builds.first());
  }

  get usedBytes() {
    return this.adder.usedBytes + this.members.reduce((sum, member) => sum + member.usedBytes, 0);
  }

  /** How many workers compute. */
  get width() {
    return this.members.length;
  }

  /** Every build in use, in every worker. Throws KernelFault when no build is left, or no worker. */
  async knownAnswerTest() {
    for (const [build, kernel] of [...this.builds.kernels]) {
      try {
        kernel.knownAnswerTest();
      } catch (error) {
        this.condemn(error, build);
      }
    }
    await Promise.all(this.members.map(async (member) => {
      for (;;) {
        try {
          return await member.ask({ type: 'test' });
        } catch (error) {
          this.condemn(error);
        }
      }
    }));
    this.build = `wasm-${this.builds.first()}`;
    this.#someone();
  }

  /** @param {Formula} formula @param {Uint8Array} slice @returns {Promise<PackedExpert>} */
  async pack(formula, slice) {
    for (;;) {
      const build = this.builds.choice(formula);
      this.sweep();
      const member = this.#someone();
      const expected = slice.length;
      member.usedBytes += expected; // at once: the next one is placed before this one is packed
      try {
        const { address, sizeBytes } = await member.ask({ type: 'pack', build, formula, slice });
        member.usedBytes += sizeBytes - expected;
        const expert = new PooledExpert(member, build, address, sizeBytes);
        member.experts.add(expert);
        this.sweep(); // the build may have fallen meanwhile
        return expert;
      } catch (error) {
        if (!member.dead) member.usedBytes -= expected;
        this.condemn(error);
      }
    }
  }

  /** Who holds least. @returns {Member} */
  #someone() {
    if (this.members.length === 0) throw new KernelFault(`${this.build}: no worker is left`);
    return this.members.reduce((a, b) => (b.usedBytes < a.usedBytes ? b : a));
  }

  /** A build that computes wrongly somewhere is out everywhere; any other error is thrown. @param {unknown} error @param {string} [build] */
  condemn(error, build) {
    if (!(error instanceof BuildFault)) throw error;
    this.builds.drop(build ?? error.build, error.message);
    this.sweep();
  }

  /** Experts in builds that are out are lost. */
  sweep() {
    for (const member of this.members) {
      const lost = [...member.experts].filter(({ build }) => this.builds.out.has(build));
      if (lost.length === 0) continue;
      const why = String(this.builds.out.get(lost[0].build));
      for (const build of new Set(lost.map((expert) => expert.build))) member.worker.postMessage({ type: 'drop', build });
      for (const expert of lost) {
        member.usedBytes -= expert.sizeBytes;
        member.experts.delete(expert);
        expert.sizeBytes = 0;
      }
      this.onLost(lost, why);
    }
  }

  /** @param {PackedExpert} expert */
  free(expert) {
    const { member, build, address, sizeBytes } = /** @type {PooledExpert} */ (expert);
    if (sizeBytes === 0) return;
    expert.sizeBytes = 0;
    member.usedBytes -= sizeBytes;
    member.experts.delete(/** @type {PooledExpert} */ (expert));
    if (!member.dead) member.worker.postMessage({ type: 'free', build, address, sizeBytes });
  }

  /** @param {Call} call @returns {Promise<EncodedPartial>} */
  async partial(call) {
    const parts = cut(call);
    if (parts.length === 0) return this.adder.partial({ ...call, experts: [] });
    this.calls += 1;
    if (this.calls === WARM_CALLS) this.knownAnswerTest().catch(() => {}); // whoever packs what was lost learns it
    const answers = await Promise.all(parts.map(([member, part]) => member.ask({ type: 'partial', call: part })));
    return answers.length === 1 ? answers[0] : this.adder.addPartials(answers, call.numTokens, call.formula.hidden_dim, call.grid);
  }

  /** @param {Uint8Array} data */
  sha256(data) {
    return this.adder.sha256(data);
  }

  /** Give all memory back; nothing may be asked afterwards. */
  close() {
    this.closed = true;
    clearTimeout(this.timer);
    for (const member of [...this.members, ...this.novices]) this.end(member, 'the kernel was closed');
    this.members = [];
    this.novices.clear();
  }

  /** Start a worker; it is given experts once it has passed its test. Throws KernelFault when no build does in it. */
  async hire() {
    for (;;) {
      const first = this.builds.first();
      const member = new Member(this, this.spawn());
      this.novices.add(member);
      try {
        await member.ask({ type: 'load', ...this.load, modules: this.builds.modules, first });
      } catch (error) {
        this.end(member, 'it failed to load');
        this.condemn(error);
        continue;
      } finally {
        this.novices.delete(member);
      }
      if (this.closed) return this.end(member, 'the kernel was closed');
      this.members.push(member);
      return;
    }
  }

  /** A worker is gone: its calls fail, its experts are lost, another takes its place. @param {Member} member @param {string} why */
  bury(member, why) {
    if (member.dead) return;
    const lost = [...member.experts];
    this.end(member, why);
    if (this.closed || !this.members.includes(member)) return; // a novice: hire() has failed already
    this.members = this.members.filter((other) => other !== member);
    this.deaths += 1;
    if (this.deaths <= MOST_DEATHS) this.hire().catch(() => {}); // one fewer, then
    if (lost.length) this.onLost(lost, why);
  }

  /** @param {Member} member @param {string} why */
  end(member, why) {
    member.dead = true;
    member.worker.terminate();
    for (const { reject } of member.waiting.values()) reject(new CallRefused('not_held', `a worker of this node is gone: ${why}`));
    member.waiting.clear();
    for (const expert of member.experts) expert.sizeBytes = 0;
    member.experts.clear();
    member.usedBytes = 0;
  }

  /** Look after the workers while there is work. A worker that was killed for memory does not say so. */
  watch() {
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      const now = performance.now();
      for (const member of [...this.members, ...this.novices]) {
        if (member.silent(now)) this.bury(member, `no answer within ${Math.round(this.silentMs / 1000)} s`);
      }
      if ([...this.members, ...this.novices].some((member) => member.waiting.size > 0)) this.watch();
    }, this.silentMs / 4);
  }
}

/** Cut a call by the workers that hold its experts; picks keep their rows. @param {Call} call @returns {[Member, any][]} */
function cut(call) {
  const experts = /** @type {PooledExpert[]} */ (call.experts);
  for (const { sizeBytes } of experts) if (sizeBytes === 0) throw new CallRefused('not_held', 'an expert of this call is gone');
  const members = [...new Set(Array.from(call.pickExpert, (index) => experts[index]?.member))];
  if (members.includes(/** @type {any} */ (undefined))) throw new CallRefused('bad_frame', 'a pick names an expert that was not passed');
  const { x } = call;
  const own = x.byteLength === x.buffer.byteLength ? x : x.slice(); // a view would take its whole buffer along
  return members.map((member) => {
    const mine = experts.map((expert, index) => ({ expert, index })).filter(({ expert }) => expert.member === member);
    const at = new Map(mine.map(({ index }, position) => [index, position]));
    const counts = new Uint16Array(call.numTokens);
    /** @type {number[]} */
    const picks = [];
    /** @type {number[]} */
    const weights = [];
    for (let row = 0, pick = 0; row < call.numTokens; row++) {
      for (let k = 0; k < call.counts[row]; k++, pick++) {
        const position = at.get(call.pickExpert[pick]);
        if (position === undefined) continue;
        counts[row] += 1;
        picks.push(position);
        weights.push(call.pickWeight[pick]);
      }
    }
    const part = {
      ...call, x: own, rowExponents: call.rowExponents.slice(), counts, pickExpert: Uint16Array.from(picks),
      pickWeight: Float32Array.from(weights), experts: mine.map(({ expert: { address, sizeBytes } }) => ({ address, sizeBytes })),
      build: mine[0].expert.build,
    };
    return [member, part];
  });
}
