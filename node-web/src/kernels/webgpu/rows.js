/** Rows of x as the shaders read them, and outputs put on the integer grid. Pure; wasm/CONTRACT.md is the arithmetic. */

import { CallRefused } from '../../errors.js';

/** @typedef {import('../kernel.js').Call} Call */
/** @typedef {{words: Uint32Array, perRow: number}} Rows */

/** The row of each pick. @param {Call} call */
export function rowsOfPicks({ counts, pickExpert, pickWeight }) {
  const rows = new Uint32Array(pickExpert.length);
  let at = 0;
  counts.forEach((count, row) => rows.fill(row, at, (at += count)));
  if (at !== pickExpert.length || at !== pickWeight.length) throw new CallRefused('bad_frame', `${pickExpert.length} picks`);
  return rows;
}

/** Rows in int8 blocks, or as floats where `block` is 0. @param {Call} call @param {number} block @returns {Rows} */
export function rowsOfX({ x, encoding, numTokens, formula: { hidden_dim: d } }, block) {
  const bytes = x.slice(); // aligned
  if (encoding <= 1) {
    if (bytes.length !== numTokens * d * (encoding ? 2 : 4)) throw new CallRefused('bad_frame', `${bytes.length} bytes of x`);
    const floats = encoding ? Float32Array.from(new Uint16Array(bytes.buffer), halfToFloat) : new Float32Array(bytes.buffer);
    if (!floats.every(Number.isFinite)) throw new CallRefused('non_finite', 'x');
    return block ? rounded(floats, numTokens, d, block) : { words: new Uint32Array(floats.buffer), perRow: d };
  }
  if (block !== (encoding === 2 ? 32 : 256)) throw new CallRefused('bad_frame', 'x is in int8 blocks of another size than gate or up want');
  const perRow = d / block + d / 4; // d is a multiple of 32 here, so rows need no padding
  if (bytes.length !== numTokens * perRow * 4) throw new CallRefused('bad_frame', `${bytes.length} bytes of x`);
  const words = new Uint32Array(bytes.buffer);
  const floats = new Float32Array(bytes.buffer);
  const ints = new Int8Array(bytes.buffer);
  for (let row = 0; row < numTokens; row++) {
    const at = row * perRow;
    if (!floats.subarray(at, at + d / block).every(Number.isFinite)) throw new CallRefused('non_finite', 'scales of x');
    if (floats.subarray(at, at + d / block).some((scale) => scale < 0)) throw new CallRefused('bad_frame', 'a scale of x below 0');
    if (ints.subarray((at + d / block) * 4, (at + perRow) * 4).includes(-128)) throw new CallRefused('bad_frame', 'an activation of -128');
  }
  return { words, perRow };
}

/** Int8 blocks by the contract's rule. @param {Float32Array} x @param {number} rows @param {number} d @param {number} block @returns {Rows} */
function rounded(x, rows, d, block) {
  const blocks = d / block;
  const perRow = blocks + d / 4;
  const words = new Uint32Array(rows * perRow);
  const scales = new Float32Array(words.buffer);
  const ints = new Int8Array(words.buffer);
  for (let row = 0; row < rows; row++) {
    for (let b = 0; b < blocks; b++) {
      const part = x.subarray(row * d + b * block, row * d + (b + 1) * block);
      const most = part.reduce((a, value) => Math.max(a, Math.abs(value)), 0);
      if (most < 2 ** -100) continue;
      const scale = Math.fround(most / 127);
      const inverse = Math.fround(1 / scale);
      scales[row * perRow + b] = scale;
      part.forEach((value, c) => { ints[(row * perRow + blocks) * 4 + b * block + c] = roundToEven(Math.fround(value * inverse)); });
    }
  }
  return { words, perRow };
}

/** @param {number} value below 2^51 */
function roundToEven(value) {
  return value + 1.5 * 2 ** 52 - 1.5 * 2 ** 52;
}

/** @param {number} half its 16 bits */
function halfToFloat(half) {
  const exponent = (half >> 10) & 31;
  const size = exponent === 31 ? (half & 1023 ? NaN : Infinity)
    : exponent ? (1 + (half & 1023) / 1024) * 2 ** (exponent - 15) : (half & 1023) * 2 ** -24;
  return half & 0x8000 ? -size : size;
}

/**
 * Add weighted outputs to the sums of their rows, on the grid.
 * @param {BigInt64Array} sums [numTokens, hidden_dim]
 * @param {Float32Array} p [picks, hidden_dim]
 * @param {Uint32Array} rows of the picks
 * @param {Call} call
 */
export function addOnGrid(sums, p, rows, { formula: { hidden_dim: d }, grid, layerExponents, rowExponents }) {
  const layer = typeof layerExponents === 'number' ? null : layerExponents;
  const steps = Float64Array.from({ length: d }, (_, c) => 2 ** ((grid ? 15 : 31) - (layer === null ? /** @type {number} */ (layerExponents) : layer[c])));
  rows.forEach((row, index) => {
    const scale = 2 ** -rowExponents[row];
    for (let c = 0; c < d; c++) {
      const value = p[index * d + c];
      const n = roundToEven(value * (steps[c] * scale));
      if (!(Math.abs(n) < 2 ** 51)) {
        throw new CallRefused(Number.isFinite(value) ? 'grid_overflow' : 'non_finite', 'an output that does not fit the grid');
      }
      sums[row * d + c] += BigInt(n);
    }
  });
}
