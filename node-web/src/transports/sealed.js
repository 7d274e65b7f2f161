/**
 * Pass messages through a SealBook without changing their order, although WebCrypto answers later.
 *
 * Frames that go out are sealed side by side and leave in order. Frames that come in are opened one after the other: each
 * may change what the next one needs. What needs no key passes at once while nothing waits. What waits is bounded.
 */

import { RemoteProtocolError, SealFault } from '../wire/errors.js';
import { decodeFrame } from '../wire/frames.js';

export const MAX_WAITING_BYTES = 64 * 2 ** 20; // four of the largest frames

/**
 * @typedef {Uint8Array<ArrayBuffer>} Bytes
 * @typedef {object} PassageEnds
 * @property {(data: Bytes) => void} send  to the network
 * @property {(data: Bytes|string) => void} receive  a message for the session
 * @property {(frame: import('../wire/frames.js').Frame, fault: SealFault) => void} refuse  one that does not open
 * @property {(why: string) => void} stuck  too much waits; nothing more passes
 */

export class SealedPassage {
  /**
   * @param {import('../wire/seal.js').SealBook} book
   * @param {PassageEnds} ends
   */
  constructor(book, ends) {
    this.book = book;
    this.ends = ends;
    /** @type {Promise<unknown>} */
    this.sent = Promise.resolve();
    this.sending = 0;
    /** @type {(Bytes|string)[]} */
    this.arrived = [];
    this.opening = false;
    this.waitingBytes = 0;
    /** @type {Promise<unknown>|null} */
    this.held = null;
  }

  /** @param {Bytes} data */
  outgoing(data) {
    const sealed = this.book.outgoing(data);
    if (!(sealed instanceof Promise) && this.sending === 0) {
      this.ends.send(sealed);
      return;
    }
    this.sending += 1;
    this.wait(data.length);
    const before = this.sent;
    this.sent = Promise.resolve(sealed).then(async (ready) => {
      await before;
      this.ends.send(ready);
    }).finally(() => {
      this.sending -= 1;
      this.waitingBytes -= data.length;
    });
    this.sent.catch((error) => this.ends.stuck(String(error))); // a stream at its end: not in this century
  }

  /** @param {ArrayBuffer|string} message */
  incoming(message) {
    const data = typeof message === 'string' ? message : new Uint8Array(message);
    this.arrived.push(data);
    this.wait(data.length);
    if (!this.opening) this.open();
  }

  /** Let what comes in wait until this is done: it changes the keys. @param {Promise<unknown>} work */
  hold(work) {
    this.held = Promise.allSettled([this.held, work]);
  }

  /** Do this once everything that was said has left, or soon. @param {() => void} then */
  afterSending(then) {
    if (this.sending === 0) then();
    else this.sent.then(then, then);
  }

  async open() {
    this.opening = true;
    try {
      for (let data = this.arrived.shift(); data !== undefined; data = this.arrived.shift()) {
        this.waitingBytes -= data.length;
        if (this.held !== null) {
          const held = this.held;
          await held;
          if (this.held === held) this.held = null;
        }
        if (typeof data === 'string') {
          this.ends.receive(data);
          continue;
        }
        try {
          const opened = this.book.incoming(data);
          this.ends.receive(opened instanceof Promise ? await opened : opened);
        } catch (error) {
          if (!(error instanceof SealFault)) throw error;
          this.ends.refuse(decodeFrame(data), error);
        }
      }
    } finally {
      this.opening = false;
    }
  }

  /** @param {number} sizeBytes */
  wait(sizeBytes) {
    this.waitingBytes += sizeBytes;
    if (this.waitingBytes > MAX_WAITING_BYTES) {
      this.arrived = [];
      this.ends.stuck(new RemoteProtocolError('more came than could be opened').message);
    }
  }
}
