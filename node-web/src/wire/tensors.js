/**
 * Encode how activations (x) and partials travel; mirrors `relay/wire/tensors.py`, where the theory stands.
 *
 * The kernel does this in WebAssembly for every call; this is the readable twin, used to check it and to test.
 * Every float32 operation is followed by Math.fround: one rounding each, as the contract says.
 */

import { LocalProtocolError, RemoteProtocolError } from './errors.js';

/** How x travels. */
export const XEncoding = Object.freeze({ F32: 0, F16: 1, Q8A32: 2, Q8A256: 3 });

/** On which grid partials are summed. */
export const Grid = Object.freeze({ X32: 0, X16: 1 });

/** Columns that share a scale. @type {Map<number, number>} */
export const BLOCKS = new Map([
  [XEncoding.Q8A32, 32],
  [XEncoding.Q8A256, 256],
]);

/** Bytes per channel a row may have, narrowest first. @type {Map<number, number[]>} */
export const WIDTHS = new Map([
  [Grid.X32, [4, 8]],
  [Grid.X16, [2, 4, 8]],
]);

const ROW_ALIGN_BYTES = 8;
const TINY = 2 ** -100; // CONTRACT.md: a block below this is all zeros
const F16_MAX = 65504;
const { fround } = Math;

/**
 * Rows as int8 blocks: `ints` [numTokens, hiddenDim], `scales` [numTokens, hiddenDim / block].
 * @typedef {{ints: Int8Array, scales: Float32Array, block: number}} QuantisedRows
 */

/**
 * Round rows to int8 blocks exactly as every kernel does.
 * @param {Float32Array} x [numTokens, hiddenDim], hiddenDim a multiple of block
 * @param {number} block
 * @returns {QuantisedRows}
 */
export function quantiseRows(x, block) {
  if (x.length % block) throw new LocalProtocolError(`${x.length} values are no multiple of the block ${block}`);
  const ints = new Int8Array(x.length);
  const scales = new Float32Array(x.length / block);
  for (let b = 0; b < scales.length; b++) {
    let amax = 0;
    for (let i = b * block; i < (b + 1) * block; i++) {
      if (!Number.isFinite(x[i])) throw new LocalProtocolError('x is not finite');
      amax = Math.max(amax, Math.abs(x[i]));
    }
    if (amax < TINY) continue;
    const scale = fround(amax / 127);
    const inverse = fround(1 / scale);
    scales[b] = scale;
    for (let i = b * block; i < (b + 1) * block; i++) ints[i] = roundHalfEven(fround(x[i] * inverse));
  }
  return { ints, scales, block };
}

/**
 * R per row, with max|x| in [2^(R-1), 2^R); 0 for a row of zeros; clamped to [-100, 127].
 * @param {Float32Array} x
 * @param {number} hiddenDim
 * @returns {Int16Array}
 */
export function rowExponents(x, hiddenDim) {
  const exponents = new Int16Array(x.length / hiddenDim);
  for (let t = 0; t < exponents.length; t++) {
    let amax = 0;
    for (let i = t * hiddenDim; i < (t + 1) * hiddenDim; i++) amax = Math.max(amax, Math.abs(x[i]));
    exponents[t] = amax === 0 ? 0 : Math.min(Math.max(frexpExponent(amax), -100), 127);
  }
  return exponents;
}

/**
 * How long encoded x is, or null when hiddenDim does not suit the encoding.
 * @param {number} numTokens
 * @param {number} hiddenDim
 * @param {number} encoding
 */
export function xBytes(numTokens, hiddenDim, encoding) {
  if (encoding === XEncoding.F32) return numTokens * hiddenDim * 4;
  if (encoding === XEncoding.F16) return numTokens * hiddenDim * 2;
  const block = /** @type {number} */ (BLOCKS.get(encoding));
  return hiddenDim % block ? null : numTokens * ((hiddenDim / block) * 4 + hiddenDim);
}

/**
 * Rows as they travel; layouts are drawn in PROTOCOL.md, "x encodings".
 * @param {Float32Array} x [numTokens, hiddenDim]
 * @param {number} hiddenDim
 * @param {number} encoding
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function encodeX(x, hiddenDim, encoding) {
  const numTokens = x.length / hiddenDim;
  const block = BLOCKS.get(encoding);
  if (block !== undefined) {
    if (hiddenDim % block) throw new LocalProtocolError(`hidden_dim ${hiddenDim} is no multiple of the block ${block}`);
    const { ints, scales } = quantiseRows(x, block);
    const perRow = hiddenDim / block;
    const data = new Uint8Array(numTokens * (perRow * 4 + hiddenDim));
    for (let t = 0, at = 0; t < numTokens; t++) {
      data.set(bytesOf(scales.subarray(t * perRow, (t + 1) * perRow)), at);
      data.set(bytesOf(ints.subarray(t * hiddenDim, (t + 1) * hiddenDim)), at + perRow * 4);
      at += perRow * 4 + hiddenDim;
    }
    return data;
  }
  const limit = encoding === XEncoding.F16 ? F16_MAX + 15.999 : Infinity; // what rounds to infinity in f16
  for (const value of x) {
    if (!Number.isFinite(value) || Math.abs(value) > limit) throw new LocalProtocolError('x is not finite');
  }
  if (encoding === XEncoding.F32) return new Uint8Array(bytesOf(x));
  return new Uint8Array(Uint16Array.from(x, f32ToF16).buffer);
}

/**
 * Read rows back: QuantisedRows for q8a, float32 otherwise. Throws RemoteProtocolError.
 * @param {Uint8Array} data
 * @param {number} numTokens
 * @param {number} hiddenDim
 * @param {number} encoding
 * @returns {QuantisedRows|Float32Array}
 */
export function decodeX(data, numTokens, hiddenDim, encoding) {
  const expected = xBytes(numTokens, hiddenDim, encoding);
  if (expected === null) throw new RemoteProtocolError(`hidden_dim ${hiddenDim} does not suit the encoding`);
  if (data.length !== expected) throw new RemoteProtocolError(`x: ${data.length} bytes, ${expected} are needed`);
  const copy = data.slice(); // aligned, whatever the message was
  const block = BLOCKS.get(encoding);
  if (block === undefined) {
    const x =
      encoding === XEncoding.F32
        ? new Float32Array(copy.buffer)
        : Float32Array.from(new Uint16Array(copy.buffer), f16ToF32);
    if (!x.every(Number.isFinite)) throw new RemoteProtocolError('x is not finite');
    return x;
  }
  const perRow = hiddenDim / block;
  const rowBytes = perRow * 4 + hiddenDim;
  const ints = new Int8Array(numTokens * hiddenDim);
  const scales = new Float32Array(numTokens * perRow);
  for (let t = 0; t < numTokens; t++) {
    scales.set(new Float32Array(copy.buffer, t * rowBytes, perRow), t * perRow);
    ints.set(new Int8Array(copy.buffer, t * rowBytes + perRow * 4, hiddenDim), t * hiddenDim);
  }
  if (!scales.every((scale) => Number.isFinite(scale) && scale >= 0)) {
    throw new RemoteProtocolError('x: scales must be finite and not negative');
  }
  if (ints.includes(-128)) throw new RemoteProtocolError('x: -128 is no activation, kernels round to [-127, 127]');
  return { ints, scales, block };
}

/**
 * How long one partial row of this width is, padding included.
 * @param {number} hiddenDim
 * @param {number} width
 */
export function partialRowBytes(hiddenDim, width) {
  return Math.ceil((hiddenDim * width) / ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES;
}

/**
 * Each row in the narrowest width of the grid that holds all its channels.
 * @param {BigInt64Array} sums [numTokens, hiddenDim]
 * @param {number} hiddenDim
 * @param {number} grid
 * @returns {{widths: Uint8Array, data: Uint8Array<ArrayBuffer>}}
 */
export function encodePartial(sums, hiddenDim, grid) {
  const numTokens = sums.length / hiddenDim;
  const widths = new Uint8Array(numTokens);
  for (let t = 0; t < numTokens; t++) widths[t] = narrowest(sums.subarray(t * hiddenDim, (t + 1) * hiddenDim), grid);
  const data = new Uint8Array(widths.reduce((sum, width) => sum + partialRowBytes(hiddenDim, width), 0));
  for (let t = 0, at = 0; t < numTokens; t++) {
    const row = rowOf(data, at, hiddenDim, widths[t]);
    for (let i = 0; i < hiddenDim; i++) {
      const value = sums[t * hiddenDim + i];
      if (row instanceof BigInt64Array) row[i] = value;
      else row[i] = Number(value);
    }
    at += partialRowBytes(hiddenDim, widths[t]);
  }
  return { widths, data };
}

/**
 * Read partial rows back, [widths.length, hiddenDim]. Throws RemoteProtocolError.
 * @param {Uint8Array} widths
 * @param {Uint8Array} data
 * @param {number} hiddenDim
 * @param {number} grid
 * @returns {BigInt64Array}
 */
export function decodePartial(widths, data, hiddenDim, grid) {
  checkPartial(widths, data.length, hiddenDim, grid);
  const copy = data.slice();
  const sums = new BigInt64Array(widths.length * hiddenDim);
  for (let t = 0, at = 0; t < widths.length; t++) {
    const row = rowOf(copy, at, hiddenDim, widths[t]);
    for (let i = 0; i < hiddenDim; i++) sums[t * hiddenDim + i] = BigInt(row[i]);
    const end = at + partialRowBytes(hiddenDim, widths[t]);
    if (copy.subarray(at + hiddenDim * widths[t], end).some(Boolean)) {
      throw new RemoteProtocolError('partial: padding is not zero');
    }
    at = end;
  }
  return sums;
}

/**
 * Refuse widths the grid does not have and data that is not exactly as long as they say.
 * @param {Uint8Array} widths
 * @param {number} dataBytes
 * @param {number} hiddenDim
 * @param {number} grid
 */
export function checkPartial(widths, dataBytes, hiddenDim, grid) {
  if (!widths.length || !hiddenDim) throw new RemoteProtocolError('partial: no rows or no channels');
  const allowed = /** @type {number[]} */ (WIDTHS.get(grid));
  let expected = 0;
  for (const width of widths) {
    if (!allowed.includes(width)) throw new RemoteProtocolError(`partial: rows are ${allowed} bytes wide, not ${width}`);
    expected += partialRowBytes(hiddenDim, width);
  }
  if (dataBytes !== expected) throw new RemoteProtocolError(`partial: ${dataBytes} bytes of rows, ${expected} are needed`);
}

/**
 * @param {BigInt64Array} row
 * @param {number} grid
 */
function narrowest(row, grid) {
  let extent = 0n; // ~v folds the negative half onto the other
  for (const value of row) {
    const folded = value < 0n ? ~value : value;
    if (folded > extent) extent = folded;
  }
  const allowed = /** @type {number[]} */ (WIDTHS.get(grid));
  return allowed.find((width) => extent < 1n << BigInt(8 * width - 1)) ?? 8;
}

/**
 * @param {Uint8Array} data
 * @param {number} at
 * @param {number} hiddenDim
 * @param {number} width
 */
function rowOf(data, at, hiddenDim, width) {
  const offset = data.byteOffset + at;
  if (width === 2) return new Int16Array(data.buffer, offset, hiddenDim);
  if (width === 4) return new Int32Array(data.buffer, offset, hiddenDim);
  return new BigInt64Array(data.buffer, offset, hiddenDim);
}

/** @param {ArrayBufferView} view */
function bytesOf(view) {
  return new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
}

/** @param {number} value */
function roundHalfEven(value) {
  const floor = Math.floor(value);
  const rest = value - floor; // exact: both are float32 of like size
  if (rest !== 0.5) return rest < 0.5 ? floor : floor + 1;
  return floor % 2 === 0 ? floor : floor + 1;
}

/**
 * e with value in [2^(e-1), 2^e), for value > 0. float32 values, subnormal ones too, are normal float64.
 * @param {number} value
 */
function frexpExponent(value) {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, value);
  return ((view.getUint32(0) >>> 20) & 0x7ff) - 1022;
}

/**
 * Round float32 to float16, half to even.
 * @param {number} value finite, and finite in float16
 */
function f32ToF16(value) {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (size === 0) return sign;
  const exponent = Math.max(frexpExponent(size) - 1, -14); // of the unit digit; -14: the smallest normal number
  const steps = roundHalfEven(size * 2 ** (10 - exponent)); // 1024..2048 when normal, less when subnormal
  return sign | (((exponent + 14) << 10) + steps); // a carry runs into the exponent, as it should
}

/** @param {number} bits */
function f16ToF32(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}
