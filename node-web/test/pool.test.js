/** The pool of workers, each a real thread: the same bytes as one kernel, whatever dies meanwhile. */
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { after, test } from 'node:test';
import { Worker } from 'node:worker_threads';
import { CallRefused, KernelFault, Unreachable } from '../src/errors.js';
import { KernelMemoryFull } from '../src/kernels/kernel.js';
import { KernelBuilds } from '../src/kernels/choose.js';
import { PoolKernel } from '../src/kernels/pool.js';
import { WasmKernel } from '../src/kernels/wasm.js';
import { proveAndTime } from '../src/work.js';

const ROOT = new URL('../../', import.meta.url);
const wasm = readFileSync(new URL('relay/_built/kernel-plain.wasm', ROOT));
const relaxed = readFileSync(new URL('relay/_built/kernel-relaxed16.wasm', ROOT));
const needsRelaxed = { skip: WebAssembly.validate(relaxed) ? false : 'this node has no relaxed SIMD' };

/** @param {string} build @returns {Promise<WebAssembly.Module>} */
async function onlyPlain(build) {
  if (build !== 'plain') throw new Unreachable('not here');
  return new WebAssembly.Module(wasm);
}
const SCRIPT = new URL('../src/kernels/pool-worker.js', import.meta.url);
/** What a browser's worker has and a thread of node has not. */
const SHIM = `import { parentPort } from 'node:worker_threads';
  globalThis.postMessage = (message, options) => parentPort.postMessage(message, options?.transfer);
  globalThis.addEventListener = (_, heard) => parentPort.on('message', (data) => heard({ data }));
  parentPort.on('message', (data) => { if (data === 'die') process.exit(1); });
  await import('${SCRIPT}');`;

/** @typedef {{ postMessage(message: any, transfer?: any[]): void, terminate(): any, onmessage: any, onerror: any, mute: boolean, sent: any[] }} Thread */

/** @returns {Thread} */
function spawn() {
  const thread = new Worker(new URL(`data:text/javascript,${encodeURIComponent(SHIM)}`));
  /** @type {Thread} */
  const like = {
    postMessage: (message, transfer) => {
      like.sent.push(message);
      if (!like.mute) thread.postMessage(message, transfer);
    },
    terminate: () => thread.terminate(), onmessage: null, onerror: null, mute: false, sent: [],
  };
  thread.on('message', (data) => like.onmessage({ data }));
  thread.on('exit', (code) => code && like.onerror({ message: `the thread ended with ${code}` }));
  thread.on('error', (error) => like.onerror(error));
  return like;
}

/** @type {PoolKernel[]} */
const opened = [];
after(() => opened.forEach((pool) => pool.close()));

/** @param {any} [options] of PoolKernel.open, and `compile` of KernelBuilds */
async function open({ compile = onlyPlain, ...options } = {}) {
  /** @type {Thread[]} */
  const threads = [];
  /** @type {any[]} */
  const lost = [];
  const builds = new KernelBuilds(compile);
  await builds.open();
  await builds.all();
  const pool = await PoolKernel.open({
    builds, count: 3, onLost: (experts) => lost.push(...experts),
    spawn: () => {
      threads.push(spawn());
      return /** @type {Thread} */ (threads.at(-1));
    },
    ...options,
  });
  opened.push(pool);
  return { pool, threads, lost, builds };
}

const FORMULA = {
  hidden_dim: 96, expert_dim: 64, gate_type: 8, up_type: 8, down_type: 8,
  activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
};

/** @param {number} seed */
function slice(seed) {
  const bytes = Uint8Array.from({ length: (3 * 96 * 64 * 34) / 32 }, (_, i) => ((i + 1) * (seed * 2 + 77)) % 253);
  for (let block = 0; block < bytes.length; block += 34) bytes.set([0, 0x14], block);
  return bytes;
}

/** @param {any[]} experts @param {number} numTokens @param {number} topK @param {number} [grid] */
function callOf(experts, numTokens, topK, grid = 0) {
  const whole = Float32Array.from({ length: numTokens * 96 + 8 }, (_, i) => Math.sin(i * i));
  return {
    formula: FORMULA, numTokens, x: new Uint8Array(whole.buffer, 32, numTokens * 96 * 4), encoding: 0,
    rowExponents: new Int16Array(numTokens), grid, layerExponents: grid ? new Int32Array(96).fill(9) : 9,
    counts: new Uint16Array(numTokens).fill(topK), experts,
    pickExpert: Uint16Array.from({ length: numTokens * topK }, (_, i) => (i * 5 + (i >> 3)) % experts.length),
    pickWeight: Float32Array.from({ length: numTokens * topK }, (_, i) => 1 / (1 + (i % 7))),
  };
}

/** Wait until something holds. @param {() => boolean} condition */
async function until(condition) {
  for (const end = performance.now() + 10_000; !condition(); ) {
    assert.ok(performance.now() < end, `waited for ${condition}`);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}

/** @param {string} code */
const refusedAs = (code) => (/** @type {unknown} */ error) => error instanceof CallRefused && error.code === code;

test('a pool answers with the bytes of one kernel, on both grids, however the picks fall', async () => {
  const { pool } = await open();
  const one = await WasmKernel.load(wasm);
  const slices = Array.from({ length: 8 }, (_, seed) => slice(seed));
  const pooled = await Promise.all(slices.map((data) => pool.pack(FORMULA, data)));
  const single = slices.map((data) => one.pack(FORMULA, data));
  assert.deepEqual(pool.members.map((member) => member.experts.size).sort(), [2, 3, 3]);
  for (const [rows, topK, grid] of [[1, 1, 0], [1, 8, 0], [7, 3, 1], [40, 8, 0], [3, 0, 0]]) {
    assert.deepEqual(await pool.partial(callOf(pooled, rows, topK, grid)), one.partial(callOf(single, rows, topK, grid)));
  }
  const few = callOf(pooled.slice(0, 1), 5, 1);
  assert.deepEqual(await pool.partial(few), one.partial(callOf(single.slice(0, 1), 5, 1)));
  await pool.knownAnswerTest();
  assert.ok((await proveAndTime(pool)) > 0);
});

test('what is wrong with a call or a slice is said as one kernel says it', async () => {
  const { pool } = await open({ count: 2, limitBytes: 3 << 20 });
  const experts = await Promise.all([0, 1].map((seed) => pool.pack(FORMULA, slice(seed))));
  const call = callOf(experts, 2, 2);
  await assert.rejects(pool.partial({ ...call, layerExponents: -100 }), refusedAs('grid_overflow'));
  await assert.rejects(pool.partial({ ...call, pickExpert: call.pickExpert.map(() => 9) }), refusedAs('bad_frame'));
  await assert.rejects(pool.pack(FORMULA, slice(0).subarray(1)), refusedAs('bad_frame'));
  const used = pool.usedBytes;
  await assert.rejects(async () => { for (;;) await pool.pack(FORMULA, slice(0)); }, KernelMemoryFull);
  assert.ok(pool.usedBytes > used);
  pool.free(experts[0]);
  pool.free(experts[0]);
  await assert.rejects(pool.partial(call), refusedAs('not_held'));
});

test('a worker that dies loses its experts only, and another takes its place', async () => {
  const { pool, threads, lost } = await open();
  const slices = Array.from({ length: 6 }, (_, seed) => slice(seed));
  const experts = await Promise.all(slices.map((data) => pool.pack(FORMULA, data)));
  threads[1].postMessage('die');
  const running = pool.partial(callOf(experts, 400, 6));
  await assert.rejects(running, refusedAs('not_held'));
  await until(() => pool.width === 3);
  assert.equal(lost.length, 2);
  assert.ok(experts.every((expert) => lost.includes(expert) === (expert.sizeBytes === 0)));
  const alive = experts.filter((expert) => expert.sizeBytes > 0);
  const one = await WasmKernel.load(wasm);
  const single = slices.map((data) => one.pack(FORMULA, data));
  const left = experts.flatMap((expert, index) => (alive.includes(expert) ? [single[index]] : []));
  assert.deepEqual(await pool.partial(callOf(alive, 9, 4)), one.partial(callOf(left, 9, 4)));
  for (const expert of lost) {
    const at = experts.indexOf(expert);
    experts[at] = await pool.pack(FORMULA, slices[at]);
  }
  assert.deepEqual(pool.members.map((member) => member.experts.size), [2, 2, 2]);
  assert.deepEqual(await pool.partial(callOf(experts, 9, 6)), one.partial(callOf(single, 9, 6)));
});

test('large experts are cut by rows over all workers, with the bytes of one kernel', async () => {
  for (const count of [2, 3]) {
    const { pool } = await open({ count, splitBytes: 1000 });
    const one = await WasmKernel.load(wasm);
    const slices = Array.from({ length: 5 }, (_, seed) => slice(seed));
    const pooled = await Promise.all(slices.map((data) => pool.pack(FORMULA, data)));
    const single = slices.map((data) => one.pack(FORMULA, data));
    assert.deepEqual(pool.members.map((member) => member.experts.size), new Array(count).fill(5));
    const whole = single.reduce((sum, { sizeBytes }) => sum + sizeBytes, 0);
    const used = pool.members.map((member) => member.usedBytes);
    assert.ok(used.every((bytes) => bytes < 0.65 * whole) && used.reduce((a, b) => a + b) < 1.5 * whole, `${used} of ${whole}`);
    for (const [rows, topK, grid] of [[1, 1, 0], [1, 5, 1], [7, 3, 1], [40, 5, 0]]) {
      assert.deepEqual(await pool.partial(callOf(pooled, rows, topK, grid)), one.partial(callOf(single, rows, topK, grid)));
    }
    await assert.rejects(pool.partial({ ...callOf(pooled, 2, 2), layerExponents: -100 }), refusedAs('grid_overflow'));
    pool.free(pooled[0]);
    await assert.rejects(pool.partial(callOf(pooled, 1, 5)), refusedAs('not_held'));
    assert.deepEqual(await pool.partial(callOf(pooled.slice(1), 3, 4)), one.partial(callOf(single.slice(1), 3, 4)));
  }
});

test('whole experts and experts cut by rows answer one call together', async () => {
  const { pool } = await open({ count: 2 });
  const one = await WasmKernel.load(wasm);
  const slices = Array.from({ length: 4 }, (_, seed) => slice(seed));
  const pooled = [];
  for (const [at, data] of slices.entries()) {
    pool.splitBytes = at % 2 ? 1000 : 1 << 30;
    pooled.push(await pool.pack(FORMULA, data));
  }
  const single = slices.map((data) => one.pack(FORMULA, data));
  for (const grid of [0, 1]) assert.deepEqual(await pool.partial(callOf(pooled, 6, 4, grid)), one.partial(callOf(single, 6, 4, grid)));
});

test('when a worker of a team dies its experts are lost, the other parts are freed, and all can be packed again', async () => {
  const { pool, threads, lost } = await open({ count: 2, splitBytes: 1000 });
  const slices = [0, 1, 2].map((seed) => slice(seed));
  const experts = await Promise.all(slices.map((data) => pool.pack(FORMULA, data)));
  threads[0].postMessage('die');
  await assert.rejects(pool.partial(callOf(experts, 4, 3)), refusedAs('not_held'));
  await until(() => pool.width === 2);
  assert.deepEqual(new Set(lost), new Set(experts));
  assert.deepEqual(pool.members.map((member) => member.usedBytes), [0, 0]);
  assert.equal(threads[1].sent.filter((message) => message.type === 'free').length, 3);
  const again = await Promise.all(slices.map((data) => pool.pack(FORMULA, data)));
  const one = await WasmKernel.load(wasm);
  assert.deepEqual(await pool.partial(callOf(again, 4, 3)), one.partial(callOf(slices.map((data) => one.pack(FORMULA, data)), 4, 3)));
});

test('a worker that says nothing is given up', async () => {
  const { pool, lost } = await open({ count: 2 });
  pool.silentMs = 2000; // a busy machine takes some time to load the next one
  const experts = await Promise.all([0, 1].map((seed) => pool.pack(FORMULA, slice(seed))));
  /** @type {any} */ (pool.members[0].worker).mute = true;
  await assert.rejects(pool.partial(callOf(experts, 2, 2)), refusedAs('not_held'));
  assert.ok(lost.length === 1 && lost[0] === experts[0]);
  await until(() => pool.width === 2);
});

/** A kernel in which the known answer of a format is another one. @param {Uint8Array} code @param {number} type */
function wrongAbout(code, type) {
  const bad = new Uint8Array(code);
  const digest = /** @type {RegExpMatchArray} */ (readFileSync(new URL('wasm/hashes.txt', ROOT), 'utf8').match(new RegExp(`\\(${type}, 7, "(\\w+)"`)))[1];
  const at = Buffer.from(bad).indexOf(digest); // what the kernel compares with
  assert.ok(at > 0);
  bad[at] ^= 1;
  return new WebAssembly.Module(bad);
}

test('a kernel that computes wrongly never joins, and none is left when all workers are gone', async () => {
  await assert.rejects(open({ compile: async () => wrongAbout(wasm, 8) }), KernelFault);
  const { pool, threads } = await open({ count: 1 });
  for (let deaths = 0; deaths <= 6; deaths++) {
    await until(() => pool.width === 1);
    /** @type {Thread} */ (threads.at(-1)).postMessage('die');
    await until(() => pool.width === 0);
  }
  await assert.rejects(pool.pack(FORMULA, slice(0)), KernelFault);
  await assert.rejects(pool.knownAnswerTest(), KernelFault);
});

test('a build that is wrong about one format is out when its first slice comes; what it held is packed again', needsRelaxed, async () => {
  const formula = { ...FORMULA, down_type: 7 };
  const { pool, lost, builds } = await open({
    count: 2,
    compile: async (/** @type {string} */ build) => {
      if (build === 'plain') return new WebAssembly.Module(wasm);
      if (build === 'relaxed32') throw new Unreachable('not here');
      return wrongAbout(relaxed, 7);
    },
  });
  builds.choices.set('8/8/8', 'relaxed16'); // as if it had been the fastest
  const experts = await Promise.all([0, 1, 2].map((seed) => pool.pack(FORMULA, slice(seed))));
  assert.equal(pool.build, 'wasm-relaxed16');
  const mixed = new Uint8Array(2 * ((96 * 64 * 34) / 32) + (96 * 64 * 24) / 32).fill(0x34);
  const other = await pool.pack(formula, mixed);
  assert.match(builds.out.get('relaxed16') ?? '', /format 7: the known-answer test/);
  assert.deepEqual(new Set(lost), new Set(experts));
  assert.ok(experts.every((expert) => expert.sizeBytes === 0) && other.sizeBytes > 0);
  const again = await Promise.all([0, 1, 2].map((seed) => pool.pack(FORMULA, slice(seed))));
  const one = await WasmKernel.load(wasm);
  const single = [0, 1, 2].map((seed) => one.pack(FORMULA, slice(seed)));
  assert.deepEqual(await pool.partial(callOf(again, 9, 3)), one.partial(callOf(single, 9, 3)));
  await pool.knownAnswerTest();
  assert.equal(pool.build, 'wasm-plain');
});

test('a build that turns wrong once it is warm is found by the next test, in whichever worker', needsRelaxed, async () => {
  const { pool, lost, builds, threads } = await open({
    count: 2, compile: async (/** @type {string} */ build) => new WebAssembly.Module(build === 'plain' ? wasm : relaxed),
  });
  builds.choices.set('8/8/8', 'relaxed16');
  const experts = await Promise.all([0, 1].map((seed) => pool.pack(FORMULA, slice(seed))));
  const [thread] = threads;
  const heard = thread.onmessage;
  thread.onmessage = (/** @type {any} */ { data }) => {
    const wrong = { code: 'kernel_fault', message: 'another answer', size: null, build: 'wasm-relaxed16' };
    thread.onmessage = heard;
    heard({ data: { id: data.id, error: wrong } });
  };
  await pool.knownAnswerTest();
  assert.equal(builds.out.get('relaxed16'), 'another answer');
  assert.deepEqual(new Set(lost), new Set(experts));
  assert.ok(threads.every(({ sent }) => sent.some((message) => message.type === 'drop' && message.build === 'relaxed16')));
});

test('a kernel works above 2 GiB', async (t) => {
  let high;
  try {
    high = await WasmKernel.load(wasm, { skipBytes: 2 ** 31 + 2 ** 20 });
    high.knownAnswerTest();
  } catch (error) {
    if (error instanceof KernelMemoryFull) return t.skip('this machine gives no memory above 2 GiB');
    throw error;
  }
  const low = await WasmKernel.load(wasm);
  const experts = [0, 1, 2].map((seed) => high.pack(FORMULA, slice(seed)));
  assert.ok(experts.every((expert) => expert.address > 2 ** 31));
  const same = [0, 1, 2].map((seed) => low.pack(FORMULA, slice(seed)));
  assert.deepEqual(high.partial(callOf(experts, 7, 2)), low.partial(callOf(same, 7, 2)));
  const parts = [high.partial(callOf(experts, 7, 2)), high.partial(callOf(experts, 7, 2))];
  assert.deepEqual(high.addPartials(parts, 7, 96, 0), low.addPartials(parts, 7, 96, 0));
  assert.equal(high.sha256(slice(1)), low.sha256(slice(1)));
  const { x, ...call } = callOf([], 1, 2);
  const asked = { ...call, x: x.slice(), pickExpert: Uint16Array.of(0, 1) };
  const rows = /** @type {const} */ ([0, 64, 0, 96]);
  const held = [0, 1].map((seed) => high.packRows(FORMULA, slice(seed), rows));
  const h = high.hidden({ ...asked, experts: held }, rows);
  assert.deepEqual(high.finish({ ...asked, experts: held }, rows, h), low.answer({ ...asked, experts: same.slice(0, 2) }));
  high.free(experts[1]);
  assert.equal(high.pack(FORMULA, slice(1)).address, experts[1].address);
});
