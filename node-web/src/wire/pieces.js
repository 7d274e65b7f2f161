/**
 * Cut long frames into pieces, choose what leaves next, put pieces together again. Mirrors `relay/wire/pieces.py`,
 * where a piece is drawn. Pure.
 */

import { FrameTooLarge, RemoteProtocolError } from './errors.js';
import {
  decodeFrame, FLAG_SEALED, FrameType, HEADER_BYTES, isCall, isSealable, PAYLOAD_LIMITS, PIECE_BYTES, PIECE_HEAD_BYTES, SEAL_BYTES, typeName,
} from './frames.js';

/** @typedef {Uint8Array<ArrayBuffer>} Bytes */

/** @type {Set<number>} */
const BULK = new Set([FrameType.DISPATCH, FrameType.PARTIAL, FrameType.PROBE, FrameType.ECHO]);

export const MAX_PARTS = 64; // unfinished frames; the oldest is given up
export const MAX_BYTES = 34 * 2 ** 20; // two of the longest
const MAX_AGE_S = 120; // for one frame, whatever its size: no call waits as long

/** Whether a frame must be cut. @param {Uint8Array} frame */
export function tooLong(frame) {
  return frame.length > HEADER_BYTES + PIECE_BYTES;
}

/** The piece of a whole frame that begins at `offset` of its payload. @param {Uint8Array} frame @param {number} offset @returns {Bytes} */
export function cut(frame, offset) {
  const part = frame.subarray(HEADER_BYTES + offset, HEADER_BYTES + offset + PIECE_BYTES);
  const piece = new Uint8Array(HEADER_BYTES + PIECE_HEAD_BYTES + part.length);
  piece.set(frame.subarray(0, HEADER_BYTES));
  const view = new DataView(piece.buffer);
  const length = view.getUint32(8, true);
  view.setUint8(HEADER_BYTES, frame[3]);
  view.setUint8(HEADER_BYTES + 1, frame[4]);
  view.setUint32(HEADER_BYTES + 4, length, true);
  view.setUint32(HEADER_BYTES + 8, offset, true);
  view.setUint8(3, FrameType.PIECE);
  view.setUint16(4, 0, true);
  view.setUint32(8, PIECE_HEAD_BYTES + part.length, true);
  piece.set(part, HEADER_BYTES + PIECE_HEAD_BYTES);
  return piece;
}

/**
 * Read a Piece; throws RemoteProtocolError when it is none that a sender who keeps to the protocol makes.
 * @param {Uint8Array} data
 */
export function decodePiece(data) {
  const head = decodeFrame(data);
  if (head.type !== FrameType.PIECE || head.payload.length <= PIECE_HEAD_BYTES) {
    throw new RemoteProtocolError(`PIECE: ${head.payload.length} bytes are no piece`);
  }
  const view = new DataView(data.buffer, data.byteOffset + HEADER_BYTES, PIECE_HEAD_BYTES);
  const type = view.getUint8(0);
  const flags = view.getUint8(1);
  const limit = PAYLOAD_LIMITS.get(type) ?? 0;
  if (type === FrameType.PIECE || limit <= PIECE_BYTES || isCall(type) !== (head.peer !== 0)) {
    throw new RemoteProtocolError(`PIECE: of a frame of type ${type}, which is not cut`);
  }
  const sealed = flags === FLAG_SEALED && isSealable(type);
  if (view.getUint16(2, true) !== 0 || (flags !== 0 && !sealed)) throw new RemoteProtocolError('PIECE: flags and reserved must be 0');
  const length = view.getUint32(4, true);
  const offset = view.getUint32(8, true);
  if (length > limit + (sealed ? SEAL_BYTES : 0)) throw new FrameTooLarge(typeName(type), length, limit);
  const part = data.subarray(HEADER_BYTES + PIECE_HEAD_BYTES);
  if (length <= PIECE_BYTES || offset % PIECE_BYTES !== 0 || part.length !== Math.min(PIECE_BYTES, length - offset)) {
    throw new RemoteProtocolError(`PIECE: ${part.length} bytes at ${offset} are no piece of ${length}`);
  }
  return { type, sealed, length, offset, part, head };
}

/**
 * What one end has to say: put frames, pop messages in the order in which they leave.
 *
 * Beats go first. Then what is short, control before calls; once as much as a piece of that has passed while something
 * long waits, one piece of the long goes. Long frames keep their order, and so does control, short or long. Bye is the
 * last word.
 */
export class SendQueue {
  constructor() {
    this.sizeBytes = 0;
    /** @type {Bytes[]} */
    this.beats = [];
    /** @type {Bytes[]} */
    this.control = [];
    /** @type {Bytes[]} */
    this.calls = [];
    /** @type {Bytes[]} */
    this.bulk = [];
    /** @type {Bytes[]} */
    this.bye = [];
    /** Offset of the next piece of the head of a queue that is being cut. @type {Map<Bytes[], number>} */
    this.turn = new Map();
    this.passed = 0; // bytes of short frames since the last piece
  }

  get empty() {
    return this.sizeBytes === 0;
  }

  /** Queue one whole frame, as it was sealed. @param {Bytes} frame */
  put(frame) {
    const kind = frame[3];
    let queue = this.control;
    if (kind === FrameType.PING || kind === FrameType.PONG) queue = this.beats;
    else if (kind === FrameType.BYE) queue = this.bye;
    else if (BULK.has(kind)) queue = tooLong(frame) ? this.bulk : this.calls;
    queue.push(frame);
    this.sizeBytes += frame.length;
  }

  /** The next message to write, or null. @returns {Bytes|null} */
  pop() {
    if (this.beats.length) return this.whole(this.beats);
    const longControl = this.control.length > 0 && tooLong(this.control[0]);
    const short = longControl || !this.control.length ? this.calls : this.control;
    if (short.length && (this.passed < PIECE_BYTES || !(longControl || this.bulk.length))) {
      const message = this.whole(short);
      this.passed += message.length;
      return message;
    }
    if (longControl || this.bulk.length) {
      this.passed = 0;
      return this.nextPiece(longControl ? this.control : this.bulk);
    }
    return this.bye.length ? this.whole(this.bye) : null;
  }

  /** @param {Bytes[]} queue @returns {Bytes} */
  whole(queue) {
    const frame = /** @type {Bytes} */ (queue.shift());
    this.sizeBytes -= frame.length;
    return frame;
  }

  /** @param {Bytes[]} queue */
  nextPiece(queue) {
    const frame = queue[0];
    const offset = this.turn.get(queue) ?? 0;
    this.turn.delete(queue);
    const piece = cut(frame, offset);
    if (offset + PIECE_BYTES < frame.length - HEADER_BYTES) this.turn.set(queue, offset + PIECE_BYTES);
    else this.whole(queue);
    return piece;
  }
}

/**
 * Put pieces together. Memory follows what came, never what was promised, and is bounded; what stays unfinished costs
 * the oldest frames.
 */
export class Assembler {
  constructor() {
    this.sizeBytes = 0;
    /** Oldest first. @type {Map<string, {began: number, head: Uint8Array, length: number, filled: number, parts: Uint8Array[]}>} */
    this.unfinished = new Map();
  }

  /**
   * The frame that is whole now, or null. A gap in a call (a relay drops what expired) ends that call's frame alone.
   * Throws RemoteProtocolError.
   * @param {Bytes} data
   * @param {number} now seconds
   * @returns {Bytes|null}
   */
  feed(data, now) {
    if (data.length < HEADER_BYTES || data[3] !== FrameType.PIECE) {
      if (data.length >= HEADER_BYTES && data[3] === FrameType.CANCEL) for (const kind of BULK) this.drop(keyOf(data, kind));
      return data;
    }
    const piece = decodePiece(data);
    const key = keyOf(data, piece.type);
    let part = this.unfinished.get(key);
    if (piece.offset === 0) {
      this.drop(key);
      part = { began: now, head: headOf(data, piece), length: piece.length, filled: 0, parts: [] };
      this.unfinished.set(key, part);
    } else if (part === undefined || !same(part.head, headOf(data, piece)) || part.filled !== piece.offset) {
      this.drop(key);
      if (piece.head.peer === 0) throw new RemoteProtocolError(`PIECE: ${typeName(piece.type)} has a gap before ${piece.offset}`);
      return null;
    }
    this.makeRoom(key, piece.part.length, now);
    part.parts.push(piece.part);
    part.filled += piece.part.length;
    this.sizeBytes += piece.part.length;
    if (part.filled < part.length) return null;
    this.drop(key);
    const frame = new Uint8Array(HEADER_BYTES + part.length);
    frame.set(part.head);
    let at = HEADER_BYTES;
    for (const bytes of part.parts) {
      frame.set(bytes, at);
      at += bytes.length;
    }
    return frame;
  }

  /** @param {string} keep @param {number} sizeBytes @param {number} now */
  makeRoom(keep, sizeBytes, now) {
    for (const [key, part] of this.unfinished) {
      const fits = this.unfinished.size <= MAX_PARTS && this.sizeBytes + sizeBytes <= MAX_BYTES;
      if (fits && now - part.began <= MAX_AGE_S) return;
      if (key !== keep) this.drop(key);
    }
  }

  /** @param {string} key */
  drop(key) {
    const part = this.unfinished.get(key);
    if (part === undefined) return;
    this.unfinished.delete(key);
    this.sizeBytes -= part.filled;
  }
}

/** The header of the whole. @param {Uint8Array} data @param {{type: number, sealed: boolean, length: number}} piece */
function headOf(data, { type, sealed, length }) {
  const head = data.slice(0, HEADER_BYTES);
  const view = new DataView(head.buffer);
  view.setUint8(3, type);
  view.setUint16(4, sealed ? FLAG_SEALED : 0, true);
  view.setUint32(8, length, true);
  return head;
}

/** Peer, call and type. @param {Uint8Array} data @param {number} type */
function keyOf(data, type) {
  const view = new DataView(data.buffer, data.byteOffset);
  return `${view.getUint32(12, true)} ${view.getBigUint64(16, true)} ${type}`;
}

/** @param {Uint8Array} a @param {Uint8Array} b */
function same(a, b) {
  return a.every((byte, i) => byte === b[i]);
}
