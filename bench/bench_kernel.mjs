/** kernel_timing.js in node; bench_kernel.py passes what to measure as JSON and reads the rows from stdout. */
import { readFileSync } from 'node:fs';
import { Worker } from 'node:worker_threads';
import { measure, startUp } from './kernel_timing.js';

const { kernels, folder, start_up: startUpOnly, ...shape } = JSON.parse(process.argv[2]);
/** What a browser's worker has and a thread of node has not. */
const SHIM = `import { parentPort } from 'node:worker_threads';
  globalThis.postMessage = (message) => parentPort.postMessage(message);
  globalThis.addEventListener = (_, heard) => parentPort.on('message', (data) => heard({ data }));
  await import('${new URL('kernel_worker.js', import.meta.url)}');`;

function spawn() {
  const thread = new Worker(new URL(`data:text/javascript,${encodeURIComponent(SHIM)}`));
  const like = { postMessage: (message) => thread.postMessage(message), terminate: () => thread.terminate() };
  thread.on('message', (data) => like.onmessage({ data }));
  thread.on('error', (error) => like.onerror(error));
  return like;
}

const get = async (type) => new Uint8Array(readFileSync(`${folder}/${type}`));
const compile = async (build) => WebAssembly.compile(readFileSync(kernels[build]));
console.log(JSON.stringify(startUpOnly ? await startUp(compile) : await measure(shape, spawn, compile, get)));
