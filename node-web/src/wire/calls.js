/**
 * Encode what calls carry: Dispatch (rows of x and which experts to apply) and Partial (their weighted sum).
 * Mirrors `relay/wire/calls.py`, where both layouts are drawn.
 */

import { LocalProtocolError, RemoteProtocolError } from './errors.js';
import { FrameType, PAYLOAD_LIMITS } from './frames.js';
import { BLOCKS, checkPartial, WIDTHS, xBytes, XEncoding } from './tensors.js';

const DISPATCH_BYTES = 16;
const PARTIAL_BYTES = 12;
const ROW_EXPONENT_MIN = -100;
const ROW_EXPONENT_MAX = 127;

/**
 * Ask a node for the weighted sum of some experts of one layer.
 * @typedef {object} Dispatch
 * @property {number} modelTag  first four bytes of the model's hash
 * @property {number} layer
 * @property {number} numTokens
 * @property {number} hiddenDim
 * @property {number} xEncoding
 * @property {number} grid
 * @property {Int16Array} rowExponents  [numTokens]
 * @property {Uint16Array} counts  [numTokens] picks of each row
 * @property {Uint16Array} experts  [numPicks] row by row
 * @property {Float32Array} weights  [numPicks]
 * @property {Uint8Array} x  encoded rows, see tensors.js
 */

/**
 * Answer a Dispatch: per row the sum over its picks, integers on the grid, each row in its own width.
 * @typedef {object} Partial
 * @property {number} layer
 * @property {number} hiddenDim
 * @property {number} grid
 * @property {number} computeUs
 * @property {Uint8Array} widths  [numTokens]
 * @property {Uint8Array} data
 */

/**
 * The tag a Dispatch carries: the first four bytes of the model's hash, little endian.
 * @param {string} model
 */
export function modelTag(model) {
  const bytes = [6, 4, 2, 0].map((at) => model.slice(at, at + 2));
  return Number.parseInt(bytes.join(''), 16);
}

/**
 * @param {Dispatch} dispatch
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function encodeDispatch(dispatch) {
  const { rowExponents, counts, experts, weights, x } = dispatch;
  const numTokens = rowExponents.length;
  const numPicks = experts.length;
  if (counts.length !== numTokens || weights.length !== numPicks) {
    throw new LocalProtocolError('dispatch: one count per row and one weight per pick are needed');
  }
  const at = offsets(numTokens, numPicks);
  const payload = new Uint8Array(at.x + x.length);
  const view = new DataView(payload.buffer);
  view.setUint32(0, dispatch.modelTag, true);
  view.setUint16(4, dispatch.layer, true);
  view.setUint16(6, numTokens, true);
  view.setUint8(8, dispatch.xEncoding);
  view.setUint8(9, dispatch.grid);
  view.setUint16(10, dispatch.hiddenDim, true);
  view.setUint32(12, numPicks, true);
  new Int16Array(payload.buffer, at.exponents, numTokens).set(rowExponents);
  new Uint16Array(payload.buffer, at.counts, numTokens).set(counts);
  new Uint16Array(payload.buffer, at.experts, numPicks).set(experts);
  new Float32Array(payload.buffer, at.weights, numPicks).set(weights);
  payload.set(x, at.x);
  return payload;
}

/**
 * Read a Dispatch; arrays are views into `payload` where it is aligned. Throws RemoteProtocolError for any breach.
 * @param {Uint8Array} payload
 * @returns {Dispatch}
 */
export function decodeDispatch(payload) {
  if (payload.length < DISPATCH_BYTES) {
    throw new RemoteProtocolError(`dispatch: ${payload.length} bytes, the fixed part has ${DISPATCH_BYTES}`);
  }
  if (payload.byteOffset % 4) payload = payload.slice();
  const { buffer, byteOffset } = payload;
  const view = new DataView(buffer, byteOffset, payload.length);
  const numTokens = view.getUint16(6, true);
  const xEncoding = view.getUint8(8);
  const grid = view.getUint8(9);
  const hiddenDim = view.getUint16(10, true);
  const numPicks = view.getUint32(12, true);
  if (xEncoding > XEncoding.Q8A256 || !WIDTHS.has(grid)) {
    throw new RemoteProtocolError(`dispatch: unknown x encoding ${xEncoding} or grid ${grid}`);
  }
  if (!numTokens || !hiddenDim || !numPicks) {
    throw new RemoteProtocolError(`dispatch: ${numTokens} rows of ${hiddenDim} with ${numPicks} picks, none may be 0`);
  }
  const sizeOfX = xBytes(numTokens, hiddenDim, xEncoding);
  if (sizeOfX === null) {
    throw new RemoteProtocolError(`dispatch: hidden_dim ${hiddenDim} is no multiple of ${BLOCKS.get(xEncoding)}`);
  }
  const at = offsets(numTokens, numPicks);
  if (payload.length !== at.x + sizeOfX) {
    throw new RemoteProtocolError(`dispatch: ${payload.length} bytes, ${at.x + sizeOfX} are needed`);
  }
  const rowExponents = new Int16Array(buffer, byteOffset + at.exponents, numTokens);
  const counts = new Uint16Array(buffer, byteOffset + at.counts, numTokens);
  const experts = new Uint16Array(buffer, byteOffset + at.experts, numPicks);
  const weights = new Float32Array(buffer, byteOffset + at.weights, numPicks);
  if (counts.reduce((sum, count) => sum + count, 0) !== numPicks) {
    throw new RemoteProtocolError(`dispatch: counts do not add up to ${numPicks} picks`);
  }
  if (rowExponents.some((exponent) => exponent < ROW_EXPONENT_MIN || exponent > ROW_EXPONENT_MAX)) {
    throw new RemoteProtocolError('dispatch: a row exponent is outside [-100, 127]');
  }
  if (!weights.every(Number.isFinite)) throw new RemoteProtocolError('dispatch: a weight is not finite');
  if (numPicks % 2 && view.getUint16(at.weights - 2, true)) {
    throw new RemoteProtocolError('dispatch: padding is not zero');
  }
  return {
    modelTag: view.getUint32(0, true),
    layer: view.getUint16(4, true),
    numTokens,
    hiddenDim,
    xEncoding,
    grid,
    rowExponents,
    counts,
    experts,
    weights,
    x: payload.subarray(at.x),
  };
}

/**
 * @param {Partial} partial
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function encodePartialCall({ layer, hiddenDim, grid, computeUs, widths, data }) {
  const atRows = rowsAt(widths.length);
  const payload = new Uint8Array(atRows + data.length);
  const view = new DataView(payload.buffer);
  view.setUint16(0, layer, true);
  view.setUint16(2, widths.length, true);
  view.setUint16(4, hiddenDim, true);
  view.setUint8(6, grid);
  view.setUint32(8, Math.min(Math.round(computeUs), 0xffffffff), true);
  payload.set(widths, PARTIAL_BYTES);
  payload.set(data, atRows);
  return payload;
}

/**
 * Read a Partial; rows are checked for length and decoded by `decodePartial` of tensors.js.
 * @param {Uint8Array} payload
 * @returns {Partial}
 */
export function decodePartialCall(payload) {
  if (payload.length < PARTIAL_BYTES) {
    throw new RemoteProtocolError(`partial: ${payload.length} bytes, the fixed part has ${PARTIAL_BYTES}`);
  }
  const view = new DataView(payload.buffer, payload.byteOffset, payload.length);
  const numTokens = view.getUint16(2, true);
  const hiddenDim = view.getUint16(4, true);
  const grid = view.getUint8(6);
  if (!WIDTHS.has(grid) || view.getUint8(7)) throw new RemoteProtocolError(`partial: unknown grid ${grid}`);
  const atRows = rowsAt(numTokens);
  if (payload.length < atRows || payload.subarray(PARTIAL_BYTES + numTokens, atRows).some(Boolean)) {
    throw new RemoteProtocolError('partial: cut off in its widths, or padding is not zero');
  }
  const widths = payload.subarray(PARTIAL_BYTES, PARTIAL_BYTES + numTokens);
  checkPartial(widths, payload.length - atRows, hiddenDim, grid);
  return {
    layer: view.getUint16(0, true),
    hiddenDim,
    grid,
    computeUs: view.getUint32(8, true),
    widths,
    data: payload.subarray(atRows),
  };
}

/**
 * Read a Probe: how many bytes its answer shall carry.
 * @param {Uint8Array} payload
 */
export function decodeProbe(payload) {
  if (payload.length < 4) throw new RemoteProtocolError(`probe: ${payload.length} bytes, at least 4 are needed`);
  const answerBytes = new DataView(payload.buffer, payload.byteOffset, payload.length).getUint32(0, true);
  const limit = /** @type {number} */ (PAYLOAD_LIMITS.get(FrameType.ECHO));
  if (answerBytes > limit) throw new RemoteProtocolError(`probe: an answer of ${answerBytes} bytes is larger than a frame`);
  return answerBytes;
}

/**
 * @param {number} numTokens
 * @param {number} numPicks
 */
function offsets(numTokens, numPicks) {
  const counts = DISPATCH_BYTES + 2 * numTokens;
  const experts = counts + 2 * numTokens;
  const weights = experts + 2 * (numPicks + (numPicks % 2));
  return { exponents: DISPATCH_BYTES, counts, experts, weights, x: weights + 4 * numPicks };
}

/** @param {number} numTokens */
function rowsAt(numTokens) {
  return Math.ceil((PARTIAL_BYTES + numTokens) / 8) * 8;
}
