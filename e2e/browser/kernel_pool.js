/** In a page: a pool of two real workers beside one kernel, and what is left of it when a worker has ended. */
import { KernelBuilds } from '/src/kernels/choose.js';
import { ChosenKernel } from '/src/kernels/chosen.js';
import { PoolKernel } from '/src/kernels/pool.js';

const FORMULA = {
  hidden_dim: 256, expert_dim: 256, gate_type: 12, up_type: 12, down_type: 14,
  activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
};
const ROWS = [1, 5];

const builds = new KernelBuilds((build) => WebAssembly.compileStreaming(fetch(`/kernels/kernel-${build}.wasm`)));
await builds.open();
const size = builds.kernel(builds.first()).sliceBytes(FORMULA);
const slices = [1, 2, 3, 4].map((seed) => Uint8Array.from({ length: size }, (_, i) => (i % 144 < 4 ? 0x14 : (i * seed * 31 + (i >> 7)) & 0x33)));
const one = new ChosenKernel(builds);
const single = await Promise.all(slices.map((slice) => one.pack(FORMULA, slice)));
const wanted = ROWS.map((rows) => text(one.partial(callOf(single, rows))));
const lost = [];
let pool;
let experts;

/** Do both answer with the same bytes? */
export async function open(splitBytes) {
  const spawn = () => new Worker('/src/kernels/pool-worker.js', { type: 'module' });
  pool = await PoolKernel.open({ builds, count: 2, spawn, onLost: (gone) => lost.push(...gone), silentMs: 3000, splitBytes });
  experts = await Promise.all(slices.map((slice) => pool.pack(FORMULA, slice)));
  const found = [];
  for (const rows of ROWS) found.push(text(await pool.partial(callOf(experts, rows))));
  return found.join(';') === wanted.join(';');
}

/** A worker has ended meanwhile: what was lost, and do both answer the same when it is packed again? */
export async function goOn() {
  const code = await pool.partial(callOf(experts, 1)).then(() => 'answered', (error) => error.code);
  while (pool.width < 2) await new Promise((resolve) => setTimeout(resolve, 20));
  const gone = experts.filter((expert) => expert.sizeBytes === 0).length;
  const again = await Promise.all(experts.map((expert, i) => (expert.sizeBytes ? expert : pool.pack(FORMULA, slices[i]))));
  return { code, gone, lost: lost.length, same: text(await pool.partial(callOf(again, ROWS[1]))) === wanted[1] };
}

function callOf(held, rows) {
  return {
    formula: FORMULA, numTokens: rows, encoding: 0, rowExponents: new Int16Array(rows).fill(1), grid: 0, layerExponents: 60,
    x: new Uint8Array(Float32Array.from({ length: rows * 256 }, (_, i) => Math.sin(i)).buffer),
    counts: new Uint16Array(rows).fill(held.length), experts: held,
    pickExpert: Uint16Array.from({ length: rows * held.length }, (_, i) => i % held.length),
    pickWeight: new Float32Array(rows * held.length).fill(0.25),
  };
}

function text({ widths, data }) {
  return [...widths, ...data].join();
}
