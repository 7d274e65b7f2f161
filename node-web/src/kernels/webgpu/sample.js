/** Small experts with tame weights, to compare one kernel with another. Pure. */

import { FORMATS, matrices, rowBytes } from './formats.js';

/** @typedef {import('../kernel.js').Formula} Formula */

/**
 * Three slices of a small expert with the formats and arithmetic of `formula`, and rows for them.
 * @param {Formula} formula @param {number} rows @param {number} seed
 */
export function sample(formula, rows, seed) {
  let state = (seed * 2654435761 + formula.up_type + 1) >>> 0 || 1;
  const next = () => {
    state ^= state << 13; state ^= state >>> 17; state ^= state << 5;
    return state >>> 0;
  };
  const widest = Math.max(...matrices(formula).map(({ type }) => FORMATS[type].cols));
  const [d, f] = widest === 256 ? [512, 256] : widest === 64 ? [128, 64] : widest === 32 ? [96, 64] : [64, 36];
  const small = { ...formula, hidden_dim: d, expert_dim: f };
  const sides = matrices(small);
  const numBiases = formula.biased ? sides.reduce((sum, side) => sum + side.rows, 0) : 0;
  const numScales = formula.scaled ? sides.length : 0;
  const blocks = sides.reduce((sum, side) => sum + side.rows * rowBytes(side.type, side.cols), 0);
  const slices = [0, 1, 2].map(() => {
    const slice = new Uint8Array(blocks + 4 * (numBiases + numScales));
    for (let i = 0; i < blocks; i++) slice[i] = next() >>> 24;
    let at = 0;
    for (const { type, rows: count, cols } of sides) {
      const { bytes, tame } = FORMATS[type];
      for (const end = at + count * rowBytes(type, cols); at < end; at += bytes) {
        for (const [offset, keep, set] of tame) slice[at + offset] = (slice[at + offset] & keep) | set;
      }
    }
    const extras = Float32Array.from({ length: numBiases + numScales }, (_, i) => (i < numBiases ? 0 : 1) + (next() - 2 ** 31) / 2 ** 33);
    slice.set(new Uint8Array(extras.buffer), blocks);
    return slice;
  });
  const x = Float32Array.from({ length: rows * d }, () => (next() - 2 ** 31) / 2 ** 31);
  return { formula: small, slices, x };
}

/** The largest difference of two answers, as a share of the row's largest. @param {BigInt64Array} ours @param {BigInt64Array} exact @param {number} d */
export function worstOf(ours, exact, d) {
  let worst = 0;
  for (let row = 0; row < exact.length; row += d) {
    let scale = 1;
    for (let c = row; c < row + d; c++) scale = Math.max(scale, Math.abs(Number(exact[c])));
    for (let c = row; c < row + d; c++) worst = Math.max(worst, Math.abs(Number(ours[c] - exact[c])) / scale);
  }
  return worst;
}
