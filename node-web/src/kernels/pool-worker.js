/**
 * One of the pool's workers: wasm kernels with memories of their own, one for each build in use, and a queue of messages.
 * See pool.js for the other end.
 *
 * In:  {type: 'load', modules, first, limitBytes} · {type: 'test', id} · {type: 'pack', id, build, formula, slice}
 *      {type: 'partial', id, call} · {type: 'free', build, address, sizeBytes} · {type: 'drop', build}
 * Out: {id, result} or {id, error: {code, message, size, build}}; the answer to 'load' has id 0
 */
import { messageOf, NodeError } from '../errors.js';
import { BuildFault, KernelMemoryFull, PackedExpert } from './kernel.js';
import { WasmKernel } from './wasm.js';

/** @type {Map<string, WebAssembly.Module>} */
let modules = new Map();
/** @type {number|undefined} */
let limitBytes;
/** @type {Map<string, WasmKernel>} those that passed their test */
const kernels = new Map();

/** @param {string} build */
function kernelOf(build) {
  let kernel = kernels.get(build);
  if (kernel === undefined) {
    const module = modules.get(build);
    if (module === undefined) throw new Error(`the worker has no build ${build}`);
    kernel = WasmKernel.from(module, { limitBytes });
    kernel.knownAnswerTest();
    kernels.set(build, kernel);
  }
  return kernel;
}

/** @param {any} message @returns {any} */
function carryOut(message) {
  switch (message.type) {
    case 'load':
      ({ modules, limitBytes } = message);
      kernelOf(message.first);
      return undefined;
    case 'test': return kernels.forEach((kernel) => kernel.knownAnswerTest());
    case 'pack': {
      const { address, sizeBytes } = kernelOf(message.build).pack(message.formula, message.slice);
      return { address, sizeBytes };
    }
    case 'partial': {
      const experts = message.call.experts.map((/** @type {PackedExpert} */ e) => new PackedExpert(e.address, e.sizeBytes));
      return kernelOf(message.call.build).partial({ ...message.call, experts });
    }
    case 'free': return kernels.get(message.build)?.free(new PackedExpert(message.address, message.sizeBytes));
    case 'drop': return kernels.delete(message.build);
    default: throw new Error(`no such message: ${message.type}`);
  }
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
    const moved = data.type === 'partial' ? [result.widths.buffer, result.data.buffer] : [];
    postMessage({ id, result }, { transfer: moved });
  } catch (error) {
    postMessage({ id, error: described(error) });
  }
});
