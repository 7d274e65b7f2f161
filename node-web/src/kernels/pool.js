/**
 * A kernel of several workers, each with a memory of its own: more cores, no shared memory, no headers needed for it.
 *
 * An expert lives in one worker. A dispatch is cut by expert: every worker computes the picks of the experts it holds,
 * and the partials are added here. They are integers, so it does not matter who computed what, nor in which order. New
 * experts go where the fewest bytes are: neighbours of a layer end up in different workers, so a dispatch finds them all.
 * A large expert is cut by rows instead, and lives in a team of all workers: each computes some units of the hidden
 * layer, then, from all of them, some channels of the output. That costs one more round of messages, and is worth it
 * where even one expert takes longer than that.
 *
 * A worker that dies, or says nothing for too long, takes what it holds with it and nothing else: its calls fail, a new
 * worker takes its place, and `onLost` names the experts, for whoever holds them to pack them again.
 */
import { CallRefused, KernelFault } from '../errors.js';
import { BuildFault, KernelMemoryFull, PackedExpert } from './kernel.js';

const SILENT_MS = 20_000; // with work to do: the largest dispatch takes a slow phone less
const SPLIT_BYTES = 8_000_000; // larger experts are cut by rows: over 1 ms of work against some 0.3 ms of messages
const SPLIT_ROWS = 16; // EXPERT_SPLIT: bounds of rows are multiples of it
const WARM_CALLS = 100; // then the engine has compiled the hot code anew, and it is tested again
const MOST_DEATHS = 6; // then the device cannot carry so many workers; those that live go on

/** @typedef {import('./choose.js').Build} Build */
/** @typedef {import('./choose.js').KernelBuilds} KernelBuilds */
/** @typedef {import('./kernel.js').Formula} Formula */
/** @typedef {import('./kernel.js').Call} Call */
/** @typedef {import('./kernel.js').EncodedPartial} EncodedPartial */
/** @typedef {{ postMessage(message: any, transfer?: any): void, terminate(): void, onmessage: any, onerror: any }} WorkerLike */
/** @typedef {{ resolve: (result: any) => void, reject: (error: Error) => void, since: number }} Waiting */

/** @typedef {import('./wasm.js').Rows} Rows */
/** @typedef {{ member: Member, address: number, sizeBytes: number }} Part */

/** An expert of a pool: the worker where it lives and what it is called there, or all of these for each member of a team. */
class PooledExpert extends PackedExpert {
  /** @param {Member|Team} place @param {Build} build @param {Part[]} parts */
  constructor(place, build, parts) {
    super(parts[0].address, parts.reduce((sum, { sizeBytes }) => sum + sizeBytes, 0));
    this.place = place;
    this.build = build;
    this.parts = parts;
    for (const { member, sizeBytes } of parts) {
      member.experts.add(this);
      member.usedBytes += sizeBytes;
    }
  }

  /** It is no longer there. */
  leave() {
    for (const { member, sizeBytes } of this.parts) {
      member.experts.delete(this);
      member.usedBytes -= sizeBytes;
    }
    this.sizeBytes = 0;
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

/** Workers that share experts by rows. */
class Team {
  /** @param {Member[]} members */
  constructor(members) {
    this.members = members;
  }

  /** What each member holds of an expert. @param {Formula} formula @returns {Rows[]} */
  rows({ hidden_dim, expert_dim }) {
    const bounds = (/** @type {number} */ dim) => this.members.map((_, i) => Math.min(dim, Math.ceil((dim * i) / this.members.length / SPLIT_ROWS) * SPLIT_ROWS)).concat(dim);
    const units = bounds(expert_dim);
    const channels = bounds(hidden_dim);
    return this.members.map((_, i) => [units[i], units[i + 1], channels[i], channels[i + 1]]);
  }

  /**
   * Two steps in every member, h exchanged between them.
   * @param {any} call cut for this team; its experts are the parts of each
   * @param {import('./wasm.js').WasmKernel} encoder
   * @returns {Promise<EncodedPartial>}
   */
  async partial(call, encoder) {
    const rows = this.rows(call.formula);
    const { hidden_dim: hiddenDim, expert_dim: expertDim } = call.formula;
    const numPicks = call.pickExpert.length;
    const own = this.members.map((_, i) => ({ ...call, experts: call.experts.map((/** @type {Part[]} */ parts) => ({ address: parts[i].address, sizeBytes: parts[i].sizeBytes })) }));
    const halves = await Promise.all(this.members.map((member, i) => member.ask({ type: 'hidden', call: own[i], rows: rows[i] })));
    const h = joined(halves, numPicks, rows.map(([first, end]) => [first, end]), new Float32Array(numPicks * expertDim));
    const finish = (/** @type {Member} */ member, /** @type {number} */ i) => member.ask({ type: 'finish', call: { ...own[i], x: null }, rows: rows[i], h });
    const parts = await Promise.all(this.members.map(finish));
    const sums = joined(parts, call.numTokens, rows.map(([, , first, end]) => [first, end]), new BigInt64Array(call.numTokens * hiddenDim));
    return encoder.encodePartial(sums, call.numTokens, hiddenDim, call.grid);
  }
}

/**
 * Put stretches of columns side by side.
 * @template {Float32Array|BigInt64Array} T
 * @param {T[]} stretches @param {number} numRows @param {number[][]} columns first and end of each @param {T} whole
 */
function joined(stretches, numRows, columns, whole) {
  const width = whole.length / Math.max(numRows, 1);
  for (const [i, stretch] of stretches.entries()) {
    const [first, end] = columns[i];
    for (let row = 0; row < numRows; row++) whole.set(/** @type {any} */ (stretch.subarray(row * (end - first), (row + 1) * (end - first))), row * width + first);
  }
  return whole;
}

/** Like `Kernel` (kernel.js), but what takes time gives promises. */
export class PoolKernel {
  /**
   * @param {object} options
   * @param {KernelBuilds} options.builds are opened when they are not
   * @param {number} options.count workers
   * @param {number} [options.limitBytes] of each worker's memory
   * @param {() => WorkerLike} options.spawn opens one pool-worker.js
   * @param {(experts: PackedExpert[], why: string) => void} [options.onLost]
   * @param {number} [options.silentMs]
   * @param {number} [options.splitBytes] larger experts are cut by rows
   * @returns {Promise<PoolKernel>} once every worker has passed its known-answer test; throws KernelFault
   */
  static async open({ builds, count, limitBytes, spawn, onLost = () => {}, silentMs = SILENT_MS, splitBytes = SPLIT_BYTES }) {
    const workers = Array.from({ length: count }, spawn); // they load their script while the builds come
    let close = () => workers.forEach((worker) => worker.terminate());
    try {
      await builds.open();
      const pool = new PoolKernel(builds, { limitBytes }, spawn, onLost, { silentMs, splitBytes });
      const novices = workers.map((worker) => new Member(pool, worker));
      for (const novice of novices) pool.novices.add(novice);
      close = () => pool.close();
      await Promise.all(novices.map((novice) => pool.hire(novice)));
      return pool;
    } catch (error) {
      close();
      throw error;
    }
  }

  /**
   * @param {KernelBuilds} builds chooses; its kernels in this thread add partials, hash slices, and hold no experts
   * @param {{limitBytes?: number}} load
   * @param {() => WorkerLike} spawn
   * @param {(experts: PackedExpert[], why: string) => void} onLost
   * @param {{silentMs: number, splitBytes: number}} limits
   */
  constructor(builds, load, spawn, onLost, { silentMs, splitBytes }) {
    this.builds = builds;
    this.load = load;
    this.spawn = spawn;
    this.onLost = onLost;
    this.silentMs = silentMs;
    this.splitBytes = splitBytes;
    this.build = `wasm-${builds.first()}`;
    this.calls = 0;
    this.deaths = 0;
    this.closed = false;
    /** @type {Member[]} those that passed their test */
    this.members = [];
    this.team = new Team([]);
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
    const here = [...this.builds.kernels.values()].reduce((sum, kernel) => sum + kernel.usedBytes, 0);
    return here + this.members.reduce((sum, member) => sum + member.usedBytes, 0);
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

  /** @param {Formula} formula @param {Uint8Array} slice @param {boolean} [trial] @returns {Promise<PackedExpert>} */
  async pack(formula, slice, trial = false) {
    if (!trial) await this.builds.all();
    for (;;) {
      const build = trial ? this.builds.first() : this.builds.choice(formula);
      this.sweep();
      const place = this.#place(slice.length);
      const members = place instanceof Team ? place.members : [place];
      const rows = place instanceof Team ? place.rows(formula) : [null];
      const expected = slice.length / members.length;
      for (const member of members) member.usedBytes += expected; // at once: the next one is placed before this one is packed
      const message = { type: 'pack', build, module: this.builds.modules.get(build), formula, slice };
      const packing = members.map((member, i) => member.ask({ ...message, rows: rows[i] }));
      const packed = await Promise.allSettled(packing);
      for (const member of members) if (!member.dead) member.usedBytes -= expected;
      const parts = packed.flatMap((part, i) => (part.status === 'fulfilled' ? [{ member: members[i], ...part.value }] : []));
      const failed = packed.find((part) => part.status === 'rejected');
      if (failed === undefined && !members.some((member) => member.dead)) {
        const expert = new PooledExpert(place, build, parts);
        this.sweep(); // the build may have fallen meanwhile
        return expert;
      }
      for (const part of parts) this.#tellFree(part, build);
      this.condemn(failed?.reason ?? new CallRefused('not_held', 'a worker of this node is gone'));
    }
  }

  /** Get the builds that the first slice will be raced in. */
  prepare() {
    this.builds.all();
  }

  /** Where an expert of this size goes. @param {number} sizeBytes @returns {Member|Team} */
  #place(sizeBytes) {
    if (sizeBytes <= this.splitBytes || this.members.length < 2) return this.#someone();
    const { members } = this;
    if (this.team.members.length !== members.length || this.team.members.some((member) => !members.includes(member))) this.team = new Team([...members]);
    return this.team;
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
    const lost = [...new Set(this.members.flatMap((member) => [...member.experts]))].filter(({ build }) => this.builds.out.has(build));
    if (lost.length === 0) return;
    for (const member of this.members) for (const build of this.builds.out.keys()) member.worker.postMessage({ type: 'drop', build });
    for (const expert of lost) expert.leave();
    this.onLost(lost, String(this.builds.out.get(lost[0].build)));
  }

  /** @param {PackedExpert} packed */
  free(packed) {
    const expert = /** @type {PooledExpert} */ (packed);
    if (expert.sizeBytes === 0) return;
    expert.leave();
    for (const part of expert.parts) this.#tellFree(part, expert.build);
  }

  /** @param {Part} part @param {Build} build */
  #tellFree({ member, address, sizeBytes }, build) {
    if (!member.dead) member.worker.postMessage({ type: 'free', build, address, sizeBytes });
  }

  /** @param {Call} call @returns {Promise<EncodedPartial>} */
  async partial(call) {
    const parts = cut(call);
    if (parts.length === 0) return this.adder.partial({ ...call, experts: [] });
    this.calls += 1;
    if (this.calls === WARM_CALLS) this.knownAnswerTest().catch(() => {}); // whoever packs what was lost learns it
    const answers = await Promise.all(parts.map(([place, part]) =>
      (place instanceof Team ? place.partial(part, this.adder) : place.ask({ type: 'partial', call: part }))));
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

  /** Start a worker, or take this one; it is given experts once it has passed its test. Throws KernelFault when no build does in it. @param {Member} [novice] */
  async hire(novice) {
    for (;;) {
      const first = this.builds.first();
      const member = novice ?? new Member(this, this.spawn());
      novice = undefined;
      this.novices.add(member);
      try {
        await member.ask({ type: 'load', ...this.load, build: first, module: this.builds.modules.get(first) });
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
    for (const expert of lost) {
      expert.leave();
      for (const part of expert.parts) if (part.member !== member) this.#tellFree(part, expert.build);
    }
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
    for (const expert of [...member.experts]) expert.leave();
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

/** Cut a call by where its experts live; picks keep their rows. @param {Call} call @returns {[Member|Team, any][]} */
function cut(call) {
  const experts = /** @type {PooledExpert[]} */ (call.experts);
  for (const { sizeBytes } of experts) if (sizeBytes === 0) throw new CallRefused('not_held', 'an expert of this call is gone');
  const places = [...new Set(Array.from(call.pickExpert, (index) => experts[index]?.place))];
  if (places.includes(/** @type {any} */ (undefined))) throw new CallRefused('bad_frame', 'a pick names an expert that was not passed');
  const { x } = call;
  const own = x.byteLength === x.buffer.byteLength ? x : x.slice(); // a view would take its whole buffer along
  return places.map((place) => {
    const mine = experts.map((expert, index) => ({ expert, index })).filter(({ expert }) => expert.place === place);
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
    const one = (/** @type {Part} */ { address, sizeBytes }) => ({ address, sizeBytes });
    const part = {
      ...call, x: own, rowExponents: call.rowExponents.slice(), counts, pickExpert: Uint16Array.from(picks),
      pickWeight: Float32Array.from(weights), build: mine[0].expert.build,
      experts: mine.map(({ expert: { parts } }) => (place instanceof Team ? parts.map(one) : one(parts[0]))),
    };
    return [place, part];
  });
}
