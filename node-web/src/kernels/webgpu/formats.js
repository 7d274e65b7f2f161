/**
 * What the graphics kernel can hold and compute; mirrors backbone/experts/webgpu_formats.py, which a test compares. Pure.
 *
 * `file` is the WGSL under formats/; `block` columns share one scale of x (0: x is floats); `cols` columns of weights
 * stand in `bytes` bytes. `tame` makes random bytes a block with small finite scales: [offset, bits kept, bits set].
 */

/** @typedef {import('../kernel.js').Formula} Formula */
/** @typedef {{file: string, block: number, cols: number, bytes: number, tame: [number, number, number][]}} Format */

/** @param {string} file @param {number} block @param {number} cols @param {number} bytes @param {...[number, number, number]} tame @returns {Format} */
const format = (file, block, cols, bytes, ...tame) => ({ file, block, cols, bytes, tame });

export const FORMATS = /** @type {Record<number, Format>} */ ({ // by ggml type id
  0: format('f32', 0, 1, 4, [3, 0x80, 0x3c]),
  1: format('f16', 0, 1, 2, [1, 0x8f, 0x20]),
  2: format('q4_0', 32, 32, 18, [1, 0x83, 0x14]),
  3: format('q4_1', 32, 32, 20, [1, 0x83, 0x14], [3, 0x83, 0x14]),
  6: format('q5_0', 32, 32, 22, [1, 0x83, 0x14]),
  7: format('q5_1', 32, 32, 24, [1, 0x83, 0x14], [3, 0x83, 0x14]),
  8: format('q8_0', 32, 32, 34, [1, 0x83, 0x14]),
  10: format('q2_k', 256, 256, 84, [81, 0x83, 0x0c], [83, 0x83, 0x0c]),
  11: format('q3_k', 256, 256, 110, [109, 0x83, 0x0c]),
  12: format('q4_k', 256, 256, 144, [1, 0x83, 0x0c], [3, 0x83, 0x0c]),
  13: format('q5_k', 256, 256, 176, [1, 0x83, 0x08], [3, 0x83, 0x08]),
  14: format('q6_k', 256, 256, 210, [209, 0x83, 0x00]),
  16: format('iq2_xxs', 256, 256, 66, [1, 0x83, 0x0c]),
  17: format('iq2_xs', 256, 256, 74, [1, 0x83, 0x0c]),
  18: format('iq3_xxs', 256, 256, 98, [1, 0x83, 0x08]),
  19: format('iq1_s', 256, 256, 50, [1, 0x83, 0x18]),
  20: format('iq4_nl', 32, 32, 18, [1, 0x83, 0x10]),
  21: format('iq3_s', 256, 256, 110, [1, 0x83, 0x08]),
  22: format('iq2_s', 256, 256, 82, [1, 0x83, 0x0c]),
  23: format('iq4_xs', 256, 256, 136, [1, 0x83, 0x04]),
  29: format('iq1_m', 256, 256, 56, [53, 0x3f, 0x80], [55, 0x8f, 0x10]),
  30: format('bf16', 0, 1, 2, [1, 0x80, 0x3d]),
  34: format('tq1_0', 256, 256, 54, [53, 0x83, 0x28]),
  35: format('tq2_0', 256, 256, 66, [65, 0x83, 0x28]),
  39: format('mxfp4', 32, 32, 17, [0, 0x07, 0x70]),
  40: format('nvfp4', 32, 64, 36, [0, 0x8f, 0], [1, 0x8f, 0], [2, 0x8f, 0], [3, 0x8f, 0]),
});
export const ACTIVATIONS = ['silu', 'gelu', 'relu', 'relu2', 'swiglu_oai', 'swiglu_clamp', 'situ']; // enum expert_activation
export const TILE = 8; // picks that read a row of weights together: as in head.wgsl
export const BINDING_BYTES = 128 << 20; // what every device binds at once
export const READ_BEYOND = 8; // the shaders may read a word behind the last

/** Whether the weights of this format are points of a grid. @param {number} type */
export function usesGrid(type) {
  return /^iq[123]/.test(FORMATS[type].file);
}

/** @param {number} type @param {number} cols */
export function rowBytes(type, cols) {
  return (cols / FORMATS[type].cols) * FORMATS[type].bytes;
}

/** Gate (unless there is none), up and down: type, rows, columns. @param {Formula} formula @returns {{type: number, rows: number, cols: number}[]} */
export function matrices({ gate_type: gate, up_type: up, down_type: down, hidden_dim: d, expert_dim: f }) {
  const all = [{ type: up, rows: f, cols: d }, { type: down, rows: d, cols: f }];
  return gate === null ? all : [{ type: gate, rows: f, cols: d }, ...all];
}

/** How many rows of these matrices fit one binding each. @param {{type: number, cols: number}[]} sides @param {number} bindingBytes */
export function rowsPerPart(sides, bindingBytes) {
  return Math.floor((bindingBytes - READ_BEYOND - 4) / Math.max(...sides.map(({ type, cols }) => rowBytes(type, cols))));
}

/** Name the first thing the graphics kernel cannot compute though others can, or null. @param {Formula} formula @param {number} [bindingBytes] */
export function refusal(formula, bindingBytes = BINDING_BYTES) {
  const sides = matrices(formula);
  const unknown = sides.find(({ type }) => FORMATS[type] === undefined);
  if (unknown) return `the graphics kernel: format ${unknown.type}`;
  if (!ACTIVATIONS.includes(formula.activation)) return `the graphics kernel: activation ${formula.activation}`;
  const long = sides.find((side) => rowsPerPart([side], bindingBytes) < 1);
  if (long) return `the graphics kernel: a row of ${rowBytes(long.type, long.cols)} bytes; one binding holds ${bindingBytes}`;
  return null;
}
