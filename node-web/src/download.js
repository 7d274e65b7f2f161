/**
 * Get the bytes of slices over HTTP, going on where an earlier try broke off; mirrors `download` of `backbone/node/store.py`.
 *
 * What came of a broken download is kept here for the next try and in the store for the next visit. Its hash is over the
 * whole slice: kept bytes that turn out to be wrong are thrown away, and the slice is fetched from its beginning, once.
 */

import { SliceFault } from './errors.js';

const STALL_MS = 30_000; // without a byte; the relay itself waits 10 s for the backbone
const PARTIALS = 8; // downloads that broke off, kept in memory
const PART = '.part';
const WHY_CHARS = 200;

export class Downloads {
  /**
   * @param {(slice: string, signal: AbortSignal, from: number) => Promise<Response>} fetchSlice  `from`: the first byte that is missing
   * @param {import('./store.js').Keeper} keeper
   * @param {(data: Uint8Array) => Promise<string>} sha256
   * @param {(slice: string) => boolean} wants  is this slice still wanted?
   */
  constructor(fetchSlice, keeper, sha256, wants) {
    this.fetchSlice = fetchSlice;
    this.keeper = keeper;
    this.sha256 = sha256;
    this.wants = wants;
    this.bytesIn = 0;
    /** @type {Map<string, Uint8Array>} */
    this.partials = new Map();
  }

  /** How much of a slice came and is kept. @param {string} slice */
  keptOf(slice) {
    return this.partials.get(slice)?.length ?? 0;
  }

  /** The verified bytes of a slice. Throws SliceFault, or what the network threw. @param {string} slice @param {number} sizeBytes @param {AbortController} abort */
  async get(slice, sizeBytes, abort) {
    let kept = this.partials.get(slice) ?? (await this.#readPart(slice));
    this.partials.delete(slice);
    if (kept.length > sizeBytes) kept = new Uint8Array();
    for (;;) {
      const continued = kept.length > 0;
      const data = kept.length === sizeBytes ? kept : await this.#download(slice, sizeBytes, kept, abort);
      const found = await this.sha256(data);
      if (found === slice) return data;
      if (!continued) throw new SliceFault(slice, `the bytes that came hash to ${found.slice(0, 12)}`, 'bytes');
      kept = new Uint8Array(); // what was kept may have been wrong: from the beginning, once
    }
  }

  /** @param {string} slice @returns {Promise<Uint8Array>} */
  async #readPart(slice) {
    const part = await this.keeper.read(slice + PART);
    if (part === null) return new Uint8Array();
    await this.keeper.remove(slice + PART);
    return part;
  }

  /** @param {string} slice @param {number} sizeBytes @param {Uint8Array} kept @param {AbortController} abort */
  async #download(slice, sizeBytes, kept, abort) {
    const body = new Body(slice, sizeBytes, kept);
    const stalled = () => abort.abort();
    let timer = setTimeout(stalled, STALL_MS);
    try {
      await body.read(await this.fetchSlice(slice, abort.signal, kept.length), (bytes) => {
        this.bytesIn += bytes;
        clearTimeout(timer);
        timer = setTimeout(stalled, STALL_MS);
      });
      return body.data;
    } catch (error) {
      this.#keep(slice, body.data.slice(0, body.length));
      throw error;
    } finally {
      clearTimeout(timer);
    }
  }

  /** @param {string} slice @param {Uint8Array} part */
  #keep(slice, part) {
    if (part.length === 0) return;
    this.partials.set(slice, part);
    for (const oldest of this.partials.keys()) {
      if (this.partials.size <= PARTIALS) break;
      this.partials.delete(oldest);
    }
    this.keeper.write(slice + PART, part, this.wants);
  }
}

/** The bytes of one slice as they come: no more is taken than it has, and less is a fault. */
class Body {
  /** @param {string} slice @param {number} sizeBytes @param {Uint8Array} kept */
  constructor(slice, sizeBytes, kept) {
    this.slice = slice;
    this.data = new Uint8Array(sizeBytes);
    this.data.set(kept);
    this.length = kept.length;
  }

  /** @param {Response} response @param {(bytes: number) => void} progress  told of every piece */
  async read(response, progress) {
    const { data, slice } = this;
    const continues = response.status === 206
      && response.headers.get('content-range') === `bytes ${this.length}-${data.length - 1}/${data.length}`;
    if (!continues && (response.status === 206 || response.status === 416 || response.ok)) this.length = 0; // from the beginning
    if (response.body === null || !(continues || response.status === 200)) throw await refused(slice, response);
    for (const reader = response.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      progress(value.length);
      if (this.length + value.length > data.length) {
        this.length = 0;
        await reader.cancel();
        throw new SliceFault(slice, `longer than the ${data.length} bytes promised`);
      }
      data.set(value, this.length);
      this.length += value.length;
    }
    if (this.length !== data.length) throw new SliceFault(slice, `${this.length} of ${data.length} bytes came`);
  }
}

/** Why a slice was refused, read no further than one piece: a body may be of any length. @param {string} slice @param {Response} response */
async function refused(slice, response) {
  const reader = response.body?.getReader();
  const piece = await reader?.read().catch(() => undefined);
  reader?.cancel().catch(() => undefined);
  const why = new TextDecoder().decode(piece?.value?.subarray(0, WHY_CHARS));
  return new SliceFault(slice, `status ${response.status} ${why}`);
}
