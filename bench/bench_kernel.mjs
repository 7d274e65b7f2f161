/** kernel_timing.js in node; bench_kernel.py passes what to measure as JSON and reads the rows from stdout. */
import { readFileSync } from 'node:fs';
import { Worker } from 'node:worker_threads';
import { callOverhead, measure, spawnFloor, startUp } from './kernel_timing.js';

const { kernels, folder, what = 'measure', ...shape } = JSON.parse(process.argv[2]);
/** What a browser's worker has and a thread of node has not. */
const shim = (script) => `import { parentPort } from 'node:worker_threads';
  globalThis.postMessage = (message, options) => parentPort.postMessage(message, options?.transfer);
  globalThis.addEventListener = (_, heard) => parentPort.on('message', (data) => heard({ data }));
  await import('${new URL(script, import.meta.url)}');`;

function spawn(script = 'kernel_worker.js') {
  const thread = new Worker(new URL(`data:text/javascript,${encodeURIComponent(shim(script))}`));
  const like = { postMessage: (message, transfer) => thread.postMessage(message, transfer), terminate: () => thread.terminate() };
  thread.on('message', (data) => like.onmessage({ data }));
  thread.on('error', (error) => like.onerror(error));
  return like;
}

const spawnPool = () => spawn('../node-web/src/kernels/pool-worker.js');
const get = async (type) => new Uint8Array(readFileSync(`${folder}/${type}`));
const compile = async (build) => WebAssembly.compile(readFileSync(kernels[build]));
const asked = { measure: () => measure(shape, () => spawn(), compile, get), startUp: () => startUp(compile, spawnPool, shape.workers), spawnFloor: () => spawnFloor(() => spawn('empty_worker.js'), shape.workers), callOverhead: () => callOverhead(compile, spawnPool) };
console.log(JSON.stringify(await asked[what]()));
