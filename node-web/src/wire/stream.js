/**
 * Cut messages (short frames, and pieces of long ones) out of a stream of bytes: how they travel on a data channel.
 * Mirrors `relay/wire/stream.py`. Pure.
 */

import { FrameTooLarge } from './errors.js';
import { HEADER_BYTES, MAX_MESSAGE_BYTES } from './frames.js';

/** Feed it pieces in order; it gives whole frames. Their content is not looked at, but their length. */
export class Reassembler {
  constructor() {
    /** @type {Uint8Array} */
    this.rest = new Uint8Array(0);
    /** @type {Uint8Array<ArrayBuffer>|null} */
    this.frame = null; // being filled
    this.filled = 0;
  }

  /**
   * The frames that are complete now; throws FrameTooLarge when a header promises more than any frame may have.
   * @param {Uint8Array} piece
   * @returns {Uint8Array<ArrayBuffer>[]}
   */
  feed(piece) {
    const frames = [];
    for (let at = 0; at < piece.length; ) {
      if (this.frame === null) {
        const needed = HEADER_BYTES - this.rest.length;
        const head = joined(this.rest, piece.subarray(at, at + needed));
        at += Math.min(needed, piece.length - at);
        this.rest = head;
        if (head.length < HEADER_BYTES) break;
        const size = HEADER_BYTES + new DataView(head.buffer, head.byteOffset).getUint32(8, true);
        if (size > MAX_MESSAGE_BYTES) throw new FrameTooLarge('message in a stream', size, MAX_MESSAGE_BYTES);
        this.frame = new Uint8Array(size);
        this.frame.set(head);
        this.filled = HEADER_BYTES;
        this.rest = new Uint8Array(0);
      }
      const part = piece.subarray(at, at + this.frame.length - this.filled);
      this.frame.set(part, this.filled);
      this.filled += part.length;
      at += part.length;
      if (this.filled === this.frame.length) {
        frames.push(this.frame);
        this.frame = null;
      }
    }
    return frames;
  }
}

/** @param {Uint8Array} a @param {Uint8Array} b */
function joined(a, b) {
  const both = new Uint8Array(a.length + b.length);
  both.set(a);
  both.set(b, a.length);
  return both;
}
