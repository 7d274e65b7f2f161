/** What a node asks of its kernel: prove it and time it, answer one dispatch. Mirrors `backbone/node/work.py`. */

import { CallRefused } from './errors.js';
import { KernelMemoryFull } from './kernels/kernel.js';
import { encodeX, Grid, rowExponents, XEncoding } from './wire/tensors.js';

const FORMATS = new Set([ // ggml type ids this kernel has; backbone/model/formula.py
  0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 16,
  17, 18, 19, 20, 21, 22, 23, 29, 30, 34, 35, 39, 40,
]);
const ACTIVATIONS = new Set(['silu', 'gelu', 'relu', 'relu2', 'swiglu_oai', 'swiglu_clamp', 'situ']);
const GATED_ONLY = new Set(['swiglu_oai', 'swiglu_clamp', 'situ']);
const isBound = /** @param {number} value */ (value) => value >= 2 ** -20 && value <= 2 ** 20; // of alpha and limit
const SPEED_FORMULA = {
  hidden_dim: 1024, expert_dim: 512, gate_type: 8, up_type: 8, down_type: 8,
  activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
};
const SPEED_SLICE_BYTES = (3 * 1024 * 512 * 34) / 32;
const SPEED_EXPERTS = 2; // 3 MB together: more takes longer to pack than to compute
const SPEED_RUNS = 5;
const SPEED_MS = 500; // a slow device is known sooner

/**
 * @typedef {import('./kernels/kernel.js').Kernel} Kernel
 * @typedef {import('./kernels/kernel.js').PackedExpert} PackedExpert
 * @typedef {import('./wire/messages.js').AssignLayer} AssignLayer
 */

/** Name the first thing this kernel cannot compute, or null. @param {import('./wire/messages.js').Formula} formula */
export function refusal(formula) {
  const { gate_type: gate, up_type: up, down_type: down, activation, alpha, limit } = formula;
  const what = /** @param {string} text */ (text) => `formula not supported yet: ${text}`;
  const format = [gate, up, down].find((type) => type !== null && !FORMATS.has(type));
  if (format !== undefined) return what(`weight format ${format}`);
  if (!ACTIVATIONS.has(activation)) return what(`activation ${activation}`);
  if (gate === null && GATED_ONLY.has(activation)) return what(`${activation} without a gate`);
  const clampable = gate !== null && !['gelu', 'relu', 'relu2'].includes(activation);
  if (limit && (!clampable || !isBound(limit))) return what(`${activation} with limit ${limit}`);
  if (!limit && (activation === 'swiglu_oai' || activation === 'swiglu_clamp')) return what(`${activation} without a limit`);
  if ((activation === 'swiglu_oai' || activation === 'situ') && !isBound(alpha)) return what(`${activation} with alpha ${alpha}`);
  if (typeof (formula.scaled ?? false) !== 'boolean') return what('scaled neither true nor false');
  return null;
}

/**
 * Compute one dispatch: one partial row per row of x. Throws CallRefused for whatever a peer may send.
 * @param {Kernel} kernel
 * @param {AssignLayer} layer
 * @param {Map<string, {packed: PackedExpert}>} held
 * @param {import('./wire/calls.js').Dispatch} dispatch
 * @returns {import('./wire/calls.js').Partial | Promise<import('./wire/calls.js').Partial>}  as the kernel: at once, or later
 */
export function answer(kernel, layer, held, dispatch) {
  const started = performance.now();
  const numbers = [...new Set(dispatch.experts)];
  const experts = numbers.map((number) => {
    const found = held.get(layer.experts[number]);
    if (found === undefined) throw new CallRefused('not_held', `expert ${number} of layer ${dispatch.layer} is not held any more`);
    return found.packed;
  });
  const at = new Map(numbers.map((number, index) => [number, index]));
  const call = {
    formula: layer.formula,
    numTokens: dispatch.numTokens,
    x: dispatch.x,
    encoding: dispatch.xEncoding,
    rowExponents: dispatch.rowExponents,
    grid: dispatch.grid,
    layerExponents: dispatch.grid === Grid.X16 && layer.grid.x16 !== null ? typed(layer.grid.x16) : layer.grid.x32,
    counts: dispatch.counts,
    experts,
    pickExpert: dispatch.experts.map((number) => /** @type {number} */ (at.get(number))),
    pickWeight: dispatch.weights,
  };
  /** @param {import('./kernels/kernel.js').EncodedPartial} encoded */
  const partial = ({ widths, data }) => {
    const computeUs = (performance.now() - started) * 1000;
    return { layer: dispatch.layer, hiddenDim: dispatch.hiddenDim, grid: dispatch.grid, computeUs, widths, data };
  };
  /** @param {unknown} error @returns {never} */
  const refused = (error) => {
    throw error instanceof KernelMemoryFull ? new CallRefused('overloaded', error.message) : error;
  };
  try {
    const encoded = kernel.partial(call);
    return encoded instanceof Promise ? encoded.then(partial, refused) : partial(encoded);
  } catch (error) {
    return refused(error);
  }
}

/** @type {WeakMap<number[], Int32Array>} */
const typedOnce = new WeakMap();

/** The exponents of a layer in the form that is copied fast, to the kernel and to workers. @param {number[]} exponents */
function typed(exponents) {
  let found = typedOnce.get(exponents);
  if (found === undefined) typedOnce.set(exponents, (found = Int32Array.from(exponents)));
  return found;
}

/**
 * Run the known-answer test, measure, and test again: engines compile hot code anew, and have got it wrong.
 * Throws KernelFault.
 * @param {Kernel} kernel
 * @returns {Promise<number>} GB of weights per second, one row
 */
export async function proveAndTime(kernel) {
  await kernel.knownAnswerTest();
  const slice = new Uint8Array(SPEED_SLICE_BYTES).fill(0x24); // scale and ints alike: 0.016 and 36
  const experts = await Promise.all(Array.from({ length: SPEED_EXPERTS }, () => kernel.pack(SPEED_FORMULA, slice, true)));
  try {
    const x = Float32Array.from({ length: SPEED_FORMULA.hidden_dim }, (_, i) => Math.sin(i));
    const call = {
      formula: SPEED_FORMULA,
      numTokens: 1,
      x: encodeX(x, SPEED_FORMULA.hidden_dim, XEncoding.Q8A32),
      encoding: XEncoding.Q8A32,
      rowExponents: rowExponents(x, SPEED_FORMULA.hidden_dim),
      grid: Grid.X32,
      layerExponents: 20,
      counts: Uint16Array.of(SPEED_EXPERTS),
      experts,
      pickExpert: Uint16Array.from(experts.keys()),
      pickWeight: new Float32Array(SPEED_EXPERTS).fill(1 / SPEED_EXPERTS),
    };
    let bestMs = Infinity;
    const until = performance.now() + SPEED_MS;
    for (let run = 0; run < SPEED_RUNS && (run === 0 || performance.now() < until); run++) {
      const started = performance.now();
      await kernel.partial(call);
      bestMs = Math.min(bestMs, performance.now() - started);
    }
    await kernel.knownAnswerTest();
    kernel.prepare?.();
    return (SPEED_EXPERTS * SPEED_SLICE_BYTES) / Math.max(bestMs, 0.1) / 1e6; // clocks of browsers may be coarse
  } finally {
    for (const expert of experts) kernel.free(expert);
  }
}
