/**
 * Hands out pieces of a WebAssembly memory that only grows. Pure but for `grow`.
 *
 * First fit over free pieces in the order of their addresses; neighbours are joined, so slices of equal size reuse each
 * other's place and a new model can use the room of the old one. Addresses go up to 4 GiB: they are plain numbers here,
 * never results of 32-bit arithmetic.
 */
const ALIGN = 64;
const PAGE = 65536;

/** @typedef {{ at: number, size: number }} Piece */

export class Heap {
  /**
   * @param {WebAssembly.Memory} memory
   * @param {number} start first address that may be given away
   * @param {number} limitBytes never let the memory grow beyond
   */
  constructor(memory, start, limitBytes) {
    this.memory = memory;
    this.limitBytes = limitBytes;
    this.end = roundUp(start, ALIGN);
    this.usedBytes = 0;
    /** @type {Piece[]} free pieces below `end`, ascending, never adjacent */
    this.free = [];
  }

  /** @param {number} sizeBytes @returns {number | null} a multiple of 64, or null when there is no more memory */
  take(sizeBytes) {
    const size = roundUp(Math.max(sizeBytes, 1), ALIGN);
    const index = this.free.findIndex((piece) => piece.size >= size);
    if (index >= 0) {
      const piece = this.free[index];
      const { at } = piece;
      piece.at += size;
      piece.size -= size;
      if (piece.size === 0) this.free.splice(index, 1);
      this.usedBytes += size;
      return at;
    }
    const last = this.free.at(-1);
    const at = last && last.at + last.size === this.end ? last.at : this.end;
    if (!this.reach(at + size)) return null;
    if (at !== this.end) this.free.pop();
    this.end = at + size;
    this.usedBytes += size;
    return at;
  }

  /** @param {number} at @param {number} sizeBytes as they were taken */
  give(at, sizeBytes) {
    const size = roundUp(Math.max(sizeBytes, 1), ALIGN);
    this.usedBytes -= size;
    let index = this.free.findIndex((piece) => piece.at > at);
    if (index < 0) index = this.free.length;
    const before = this.free[index - 1];
    const after = this.free[index];
    const joinsBefore = before !== undefined && before.at + before.size === at;
    const joinsAfter = after !== undefined && at + size === after.at;
    if (joinsBefore) before.size += size + (joinsAfter ? after.size : 0);
    else if (joinsAfter) Object.assign(after, { at, size: after.size + size });
    else this.free.splice(index, 0, { at, size });
    if (joinsBefore && joinsAfter) this.free.splice(index, 1);
  }

  /** Make addresses below `end` usable. @param {number} end */
  reach(end) {
    const missing = end - this.memory.buffer.byteLength;
    if (missing <= 0) return true;
    if (end > this.limitBytes) return false;
    try {
      this.memory.grow(Math.ceil(missing / PAGE));
      return true;
    } catch (error) {
      if (error instanceof RangeError) return false;
      throw error;
    }
  }
}

/** @param {number} n @param {number} step */
export function roundUp(n, step) {
  return Math.ceil(n / step) * step;
}
