/**
 * One of the pool's workers: wasm kernels with memories of their own, one for each build in use, and a queue of messages.
 * See pool.js for the other end.
 *
 * In:  {type: 'load', build, module, limitBytes} · {type: 'test', id} · {type: 'pack', id, build, module, formula, slice, rows}
 *      {type: 'partial', id, call} · {type: 'hidden', id, call, rows} · {type: 'finish', id, call, rows, h}
 *      {type: 'free', build, address, sizeBytes} · {type: 'drop', build}
 * Out: {id, result} or {id, error: {code, message, size, build}}; the answer to 'load' has id 0
 */
import { CallRefused, messageOf, NodeError } from '../errors.js';
import './heap.js'; // what wasm.js imports: asked for at once, not one round trip later
import { BuildFault, KernelMemoryFull, PackedExpert } from './kernel.js';
import './refusals.js';
import { WasmKernel } from './wasm.js';

/** @type {number|undefined} */
let limitBytes;
/** @type {Map<string, WasmKernel>} those that passed their test */
const kernels = new Map();

/** @param {string} build @param {WebAssembly.Module} [module] */
function kernelOf(build, module) {
  let kernel = kernels.get(build);
  if (kernel === undefined) {
    if (module === undefined) throw new CallRefused('not_held', `this worker has no build ${build} any more`);
    kernel = WasmKernel.from(module, { limitBytes });
    kernel.knownAnswerTest();
    kernels.set(build, kernel);
  }
  return kernel;
}

/** @param {any} call @returns {import('./kernel.js').Call} */
function callOf(call) {
  return { ...call, experts: call.experts.map((/** @type {PackedExpert} */ e) => new PackedExpert(e.address, e.sizeBytes)) };
}

/** @param {any} message @returns {any} */
function carryOut(message) {
  switch (message.type) {
    case 'load':
      limitBytes = message.limitBytes;
      kernelOf(message.build, message.module);
      return undefined;
    case 'test': return kernels.forEach((kernel) => kernel.knownAnswerTest());
    case 'pack': {
      const { address, sizeBytes } = kernelOf(message.build, message.module).packRows(message.formula, message.slice, message.rows);
      return { address, sizeBytes };
    }
    case 'partial': return kernelOf(message.call.build).partial(callOf(message.call));
    case 'hidden': return kernelOf(message.call.build).hidden(callOf(message.call), message.rows);
    case 'finish': return kernelOf(message.call.build).finish(callOf(message.call), message.rows, message.h);
    case 'free': return kernels.get(message.build)?.free(new PackedExpert(message.address, message.sizeBytes));
    case 'drop': return kernels.delete(message.build);
    default: throw new Error(`no such message: ${message.type}`);
  }
}

/** The buffers of a result go over without a copy. @param {string} type @param {any} result @returns {ArrayBuffer[]} */
function moved(type, result) {
  if (type === 'partial') return [result.widths.buffer, result.data.buffer];
  return type === 'hidden' || type === 'finish' ? [result.buffer] : [];
}

/** What goes wrong here is told by its code: classes do not travel. @param {unknown} error */
function described(error) {
  const code = error instanceof KernelMemoryFull ? 'memory_full' : error instanceof NodeError ? error.code : 'kernel_fault';
  const size = error instanceof KernelMemoryFull ? [error.wantedBytes, error.usedBytes] : null;
  return { code, message: messageOf(error), size, build: error instanceof BuildFault ? error.build : null };
}

addEventListener('message', ({ data }) => {
  const { id = 0 } = data;
  try {
    const result = carryOut(data);
    if (data.type === 'free' || data.type === 'drop') return;
    postMessage({ id, result }, { transfer: moved(data.type, result) });
  } catch (error) {
    postMessage({ id, error: described(error) });
  }
});
