/** Time the wasm kernels with one and two workers; the same in a page and in node. bench_kernel.py starts it and prints the table. */
import { KernelBuilds } from '../node-web/src/kernels/choose.js';
import { ChosenKernel } from '../node-web/src/kernels/chosen.js';
import { PoolKernel } from '../node-web/src/kernels/pool.js';
import { proveAndTime } from '../node-web/src/work.js';

const WARM_MS = 400; // of many short calls: V8 compiles hot code anew, beside us, and takes it up when a function is entered again
const FORMULA = { activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false };

/** A worker asked one thing at a time. */
class Asked {
  constructor(worker) {
    this.worker = worker;
  }

  ask(message) {
    return new Promise((resolve, reject) => {
      this.worker.onmessage = ({ data }) => (data.error ? reject(new Error(data.error)) : resolve(data.ms));
      this.worker.onerror = (event) => reject(new Error(event.message));
      this.worker.postMessage(message);
    });
  }
}

/**
 * @param {object} shape hidden_dim, expert_dim, experts_a_call, types, pool_bytes, same, seconds, rows, threads; `builds`: names, or null for
 *   the one that the page would choose for each format; `foreign`: llama.cpp's kernels
 * @param {() => Worker} spawn opens kernel_worker.js
 * @param {(build: string) => Promise<WebAssembly.Module>} compile
 * @param {(type: string) => Promise<ArrayBuffer|Uint8Array>} get the slice of a type
 * @returns rows {ggml_type, variant, rows, threads, size_bytes, spent_s, read_s}
 */
export async function measure(shape, spawn, compile, get) {
  const most = Math.max(...shape.threads);
  const builds = new KernelBuilds(compile);
  if (shape.builds === null) await builds.open().then(() => builds.all());
  const found = [];
  for (const type of shape.types) {
    const formula = { ...FORMULA, hidden_dim: shape.hidden_dim, expert_dim: shape.expert_dim, gate_type: type, up_type: type, down_type: type };
    const slice = new Uint8Array(await get(String(type)));
    const group = shape.experts_a_call;
    const count = Math.max(1, Math.floor(shape.pool_bytes / slice.length / group / most)) * group * most;
    for (const variant of shape.builds ?? [builds.choice(formula)]) {
      const module = builds.modules.get(variant) ?? (await compile(variant));
      const workers = Array.from({ length: most }, () => new Asked(spawn()));
      try {
        for (const [i, worker] of workers.entries()) {
          await worker.ask({ type: 'open', module, foreign: shape.foreign });
          await worker.ask({ type: 'fill', formula, slice, count: i === 0 ? count : count / most, group, same: shape.same });
        }
        const readS = new Map();
        for (const threads of shape.foreign ? [] : shape.threads) {
          readS.set(threads, await bestS(workers.slice(0, threads), { type: 'read', count: count / threads }, shape.seconds));
        }
        for (const rows of shape.rows) {
          for (const worker of workers) await worker.ask({ type: 'rows', numTokens: rows });
          for (const end = performance.now() + WARM_MS; performance.now() < end; ) await workers[0].ask({ type: 'run', count: group });
          for (const threads of shape.threads) {
            const spentS = await bestS(workers.slice(0, threads), { type: 'run', count: count / threads }, shape.seconds);
            found.push({ ggml_type: type, variant, rows, threads, size_bytes: count * slice.length, spent_s: spentS, read_s: readS.get(threads) ?? 0 });
          }
        }
      } finally {
        for (const { worker } of workers) worker.terminate();
      }
    }
  }
  return found;
}

/** One worker is timed by itself, several by the clock on the wall around all of them. */
async function bestS(workers, message, seconds) {
  let best = Infinity;
  const end = performance.now() + 1000 * seconds;
  for (let run = 0; run < 2 || performance.now() < end; run++) {
    const started = performance.now();
    const [own] = await Promise.all(workers.map((worker) => worker.ask(message)));
    best = Math.min(best, workers.length === 1 ? own : performance.now() - started);
  }
  return best / 1000;
}

/**
 * Milliseconds of a fresh page, whose scripts have loaded and nothing else. load_ms: until the first build has come, is compiled and tested
 * in this thread (the workers load their scripts meanwhile). prove_ms: from then until every worker has tested it, too, was timed and has
 * tested it again, so that the page could make its offer. first_format_ms: what the first slice of a model would wait for if it came right
 * then: the other builds, its formats tested in each, the fastest chosen.
 */
export async function startUp(compile, spawnPool, workers) {
  const started = performance.now();
  const builds = new KernelBuilds(compile);
  const pool = workers > 1 ? PoolKernel.open({ builds, count: workers, spawn: spawnPool }) : null;
  await builds.open();
  const opened = performance.now();
  const kernel = pool ? await pool : new ChosenKernel(builds);
  await proveAndTime(kernel);
  const proven = performance.now();
  const formula = { ...FORMULA, hidden_dim: 512, expert_dim: 256, gate_type: 12, up_type: 12, down_type: 14 };
  await builds.all();
  const build = builds.choice(formula);
  kernel.close();
  return { load_ms: opened - started, prove_ms: proven - opened, first_format_ms: performance.now() - proven, build };
}

/** Milliseconds until so many empty workers have said a word: no pool starts sooner. */
export async function spawnFloor(spawn, workers) {
  const started = performance.now();
  await Promise.all(Array.from({ length: workers }, () => new Promise((resolve) => {
    const worker = spawn();
    worker.onmessage = () => resolve(worker.terminate());
  })));
  return performance.now() - started;
}

/**
 * What a call of one row costs besides computing, by how many experts it picks: median microseconds of the kernel in this thread, and
 * of a pool of two workers that holds them whole, or cut by rows.
 */
export async function callOverhead(compile, spawnPool) {
  const builds = new KernelBuilds(compile);
  await builds.open();
  const formula = { ...FORMULA, hidden_dim: 2048, expert_dim: 768, gate_type: 12, up_type: 12, down_type: 14 };
  const one = new ChosenKernel(builds);
  const slice = new Uint8Array(builds.kernel(builds.first()).sliceBytes(formula)).fill(0x24);
  const found = [];
  for (const picks of [1, 8]) {
    const bare = [];
    for (let i = 0; i < picks; i++) bare.push(await one.pack(formula, slice));
    const call = (experts) => ({
      formula, numTokens: 1, x: new Uint8Array(8192), encoding: 0, rowExponents: Int16Array.of(1), grid: 1,
      layerExponents: new Int32Array(2048).fill(60), counts: Uint16Array.of(picks), experts,
      pickExpert: Uint16Array.from({ length: picks }, (_, i) => i), pickWeight: new Float32Array(picks).fill(0.1),
    });
    const row = { picks, one_us: await medianUs(() => one.partial(call(bare))) };
    for (const [name, splitBytes] of [['pool_us', 1e9], ['pool_by_rows_us', 0]]) {
      const pool = await PoolKernel.open({ builds, count: 2, spawn: spawnPool, splitBytes });
      const held = [];
      for (let i = 0; i < picks; i++) held.push(await pool.pack(formula, slice));
      row[name] = await medianUs(() => pool.partial(call(held)));
      pool.close();
    }
    found.push(row);
    bare.forEach((expert) => one.free(expert));
  }
  return found;
}

async function medianUs(call) {
  const times = [];
  for (let run = 0; run < 200; run++) {
    const started = performance.now();
    await call();
    times.push((performance.now() - started) * 1000);
  }
  return times.sort((a, b) => a - b)[100];
}
