/** Two ends in one process: what one sends, the other receives in a later turn. For tests. */

/**
 * @typedef {import('./transport.js').TransportHandlers} TransportHandlers
 * @typedef {import('./transport.js').Transport} Transport
 */

/** @implements {Transport} */
export class MemoryTransport {
  /** @param {TransportHandlers} handlers */
  constructor(handlers) {
    this.path = 'memory';
    this.bytesSent = 0;
    this.bytesReceived = 0;
    this.movedBytes = 0;
    /** @type {TransportHandlers | null} */
    this.handlers = handlers;
    /** @type {MemoryTransport | null} */
    this.other = null;
  }

  /** Join two ends and tell both. @param {MemoryTransport} a @param {MemoryTransport} b */
  static join(a, b) {
    a.other = b;
    b.other = a;
    queueMicrotask(() => {
      a.handlers?.onOpen();
      b.handlers?.onOpen();
    });
  }

  /** @param {Uint8Array} data */
  send(data) {
    const copy = data.slice();
    this.bytesSent += copy.byteLength;
    const { other } = this;
    queueMicrotask(() => other?.received(copy.buffer));
  }

  /** @param {ArrayBuffer} data */
  received(data) {
    this.bytesReceived += data.byteLength;
    this.movedBytes += data.byteLength;
    this.handlers?.onMessage(data);
  }

  /** @param {number} code @param {string} reason */
  close(code, reason) {
    this.handlers = null;
    const other = this.other;
    this.other = null;
    if (other !== null) {
      queueMicrotask(() => {
        const handlers = other.handlers;
        other.handlers = null;
        other.other = null;
        handlers?.onClosed(code, reason);
      });
    }
  }
}
