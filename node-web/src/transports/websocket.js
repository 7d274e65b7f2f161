/**
 * Frames over a WebSocket. Long ones travel in pieces, and the socket is given little at once: what it holds, nothing can
 * overtake any more. A socket does not say when it has room again, so it is asked.
 */

import { RemoteProtocolError } from '../wire/errors.js';
import { Assembler, SendQueue } from '../wire/pieces.js';
import { reachOf } from './candidates.js';

export const OPEN_TIMEOUT_MS = 10_000;
export const MAX_UNSENT_BYTES = 64 * 2 ** 20; // replies the relay has not read; beyond this it is not reading at all
export const MAX_BUFFERED_BYTES = 64 * 1024; // given to the socket at once: two pieces
export const ASK_MS = 4;
const ABNORMAL = 1006; // RFC 6455 §7.1.5

/**
 * @typedef {import('./transport.js').TransportHandlers} TransportHandlers
 * @typedef {import('./transport.js').Transport} Transport
 */

/** @implements {Transport} */
export class WebSocketTransport {
  /**
   * @param {string} url ws: or wss:
   * @param {TransportHandlers} handlers
   * @param {string} [path] how the bytes travel
   * @param {typeof WebSocket} [Socket] another implementation, for tests
   * @param {(() => Promise<unknown>)|null} [knock] must succeed before the socket is opened
   */
  constructor(url, handlers, path = 'relayed', Socket = WebSocket, knock = null) {
    this.path = path;
    this.bytesSent = 0;
    this.bytesReceived = 0;
    this.movedBytes = 0; // what came, and what left after it had to wait: a sign of life
    this.opened = false;
    this.queue = new SendQueue();
    this.assembler = new Assembler();
    this.buffered = 0; // when we last asked
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    this.asking = undefined;
    /** @type {TransportHandlers | null} */
    this.handlers = handlers;
    /** @type {WebSocket|null} */
    this.socket = null;
    this.timer = setTimeout(() => this.ended(0, `no connection within ${OPEN_TIMEOUT_MS / 1000} s`), OPEN_TIMEOUT_MS);
    if (knock === null) this.open(new Socket(url));
    else knock().then(() => this.handlers && this.open(new Socket(url)), () => this.ended(0, ''));
  }

  /** @param {WebSocket} socket */
  open(socket) {
    this.socket = socket;
    this.socket.binaryType = 'arraybuffer';
    this.socket.onopen = () => {
      clearTimeout(this.timer);
      this.opened = true;
      this.handlers?.onOpen();
    };
    this.socket.onmessage = (event) => {
      const bytes = event.data.byteLength ?? event.data.length;
      this.bytesReceived += bytes;
      this.movedBytes += bytes;
      this.received(event.data);
    };
    this.socket.onclose = (event) => this.ended(this.opened ? event.code || ABNORMAL : 0, event.reason);
  }

  /** @param {ArrayBuffer|string} data */
  received(data) {
    if (typeof data === 'string') {
      this.handlers?.onMessage(data);
      return;
    }
    try {
      const whole = this.assembler.feed(new Uint8Array(data), performance.now() / 1000);
      if (whole !== null) this.handlers?.onMessage(whole.buffer);
    } catch (error) {
      if (!(error instanceof RemoteProtocolError)) throw error;
      this.ended(error.closeCode, error.message);
    }
  }

  /** Send one frame, in its turn. @param {Uint8Array} data */
  send(data) {
    if (this.socket?.readyState !== 1) return;
    this.queue.put(/** @type {Uint8Array<ArrayBuffer>} */ (data));
    this.drain();
    if (this.queue.sizeBytes + this.socket.bufferedAmount > MAX_UNSENT_BYTES) this.ended(ABNORMAL, 'the relay no longer reads');
  }

  /** @param {number} [most]  what the socket may hold */
  drain(most = MAX_BUFFERED_BYTES) {
    clearTimeout(this.asking);
    const { socket } = this;
    if (socket?.readyState !== 1) return;
    this.movedBytes += Math.max(0, this.buffered - socket.bufferedAmount);
    while (!this.queue.empty && socket.bufferedAmount < most) {
      const message = /** @type {Uint8Array<ArrayBuffer>} */ (this.queue.pop());
      socket.send(message);
      this.bytesSent += message.length;
    }
    this.buffered = socket.bufferedAmount;
    if (!this.queue.empty) this.asking = setTimeout(() => this.drain(), ASK_MS);
  }

  /** @param {number} code @param {string} reason */
  close(code, reason) {
    this.handlers = null;
    clearTimeout(this.timer);
    this.drain(Infinity);
    // A page may say 1000 or 3000-4999 only (WebSockets standard); the Bye frame has told the rest.
    this.socket?.close(code >= 3000 && code <= 4999 ? code : 1000, reason);
  }

  /** @param {number} code @param {string} reason */
  ended(code, reason) {
    const handlers = this.handlers;
    this.handlers = null;
    clearTimeout(this.timer);
    clearTimeout(this.asking);
    try {
      this.socket?.close();
    } finally {
      handlers?.onClosed(code, reason);
    }
  }
}

/**
 * The URL to dial of one that was announced. Mirrors `link_url` and `refusal` in `backbone/lanes/direct.py`, for what
 * a page can see: it cannot look names up.
 * @param {string} announced
 * @param {string} relayHost
 * @returns {string}
 */
export function linkUrl(announced, relayHost) {
  const url = new URL(announced);
  const scheme = { 'http:': 'ws:', 'https:': 'wss:', 'ws:': 'ws:', 'wss:': 'wss:' }[url.protocol];
  const odd = url.username || url.password || url.search || url.hash || !['/', '/v1/link'].includes(url.pathname);
  if (scheme === undefined || odd) throw new Error('this is no URL to dial');
  const [there, relay] = [reachOf(url.hostname), reachOf(relayHost)];
  const fits = there === 'public' || there === relay || (there === 'private' && relay === 'loopback');
  if (there === 'none' || !fits) throw new Error('this address is not dialled');
  return `${scheme}//${url.host}/v1/link`;
}

/**
 * Connect to the relay that serves this page. After a try that failed, ask by HTTP first whether it is there again:
 * a browser lets each WebSocket wait longer, up to 5 s, the more of them failed.
 * @param {string} page
 * @param {typeof WebSocket} [Socket]
 * @param {(url: URL, options: RequestInit) => Promise<Response>} [ask]
 * @returns {import('./transport.js').Connect}
 */
export function relayConnector(page, Socket = WebSocket, ask = (url, options) => fetch(url, options)) {
  let failed = false;
  const knock = async () => {
    const { status } = await ask(new URL('healthz', page), { cache: 'no-store', signal: AbortSignal.timeout(OPEN_TIMEOUT_MS) });
    if (status >= 502) throw new Error('a proxy answers, no relay');
  };
  return (handlers) => {
    const heard = {
      ...handlers,
      onOpen: () => {
        failed = false;
        handlers.onOpen();
      },
      onClosed: (/** @type {number} */ code, /** @type {string} */ reason) => {
        failed ||= code === 0;
        handlers.onClosed(code, reason);
      },
    };
    return new WebSocketTransport(sessionUrl(page), heard, 'relayed', Socket, failed ? knock : null);
  };
}

/** The session URL of the relay that serves this page. @param {string} page @returns {string} */
export function sessionUrl(page) {
  const url = new URL('v1/session', page);
  url.protocol = url.protocol === 'https:' ? 'wss:' : 'ws:';
  url.hash = url.search = '';
  return url.href;
}
