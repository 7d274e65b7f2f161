/**
 * One of the pool's workers: a wasm kernel with a memory of its own, and a queue of messages. See pool.js for the other end.
 *
 * In:  {type: 'load', module, limitBytes} · {type: 'test' | 'pack' | 'partial', id, ...} · {type: 'free', address, sizeBytes}
 * Out: {id, result} or {id, error: {code, message}}; the answer to 'load' has id 0
 */
import { messageOf, NodeError } from '../errors.js';
import { KernelMemoryFull, PackedExpert } from './kernel.js';
import { WasmKernel } from './wasm.js';

/** @type {WasmKernel|null} */
let kernel = null;

/** @param {any} message @returns {any} */
function carryOut(message) {
  if (kernel === null) throw new Error('the worker has no kernel');
  switch (message.type) {
    case 'test': return kernel.knownAnswerTest();
    case 'pack': {
      const { address, sizeBytes } = kernel.pack(message.formula, message.slice);
      return { address, sizeBytes };
    }
    case 'partial': {
      const experts = message.call.experts.map((/** @type {PackedExpert} */ e) => new PackedExpert(e.address, e.sizeBytes));
      return kernel.partial({ ...message.call, experts });
    }
    case 'free': return kernel.free(new PackedExpert(message.address, message.sizeBytes));
    default: throw new Error(`no such message: ${message.type}`);
  }
}

/** What goes wrong here is told by its code: classes do not travel. @param {unknown} error */
function described(error) {
  const code = error instanceof KernelMemoryFull ? 'memory_full' : error instanceof NodeError ? error.code : 'kernel_fault';
  const size = error instanceof KernelMemoryFull ? [error.wantedBytes, error.usedBytes] : null;
  return { code, message: messageOf(error), size };
}

addEventListener('message', async ({ data }) => {
  const { id = 0 } = data;
  try {
    if (data.type === 'load') {
      kernel = await WasmKernel.load(data.module, { limitBytes: data.limitBytes });
      kernel.knownAnswerTest();
      postMessage({ id, result: kernel.build });
      return;
    }
    const result = carryOut(data);
    if (data.type === 'free') return;
    const moved = data.type === 'partial' ? [result.widths.buffer, result.data.buffer] : [];
    postMessage({ id, result }, { transfer: moved });
  } catch (error) {
    postMessage({ id, error: described(error) });
  }
});
