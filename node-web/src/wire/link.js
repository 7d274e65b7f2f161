/**
 * Run one link to the backbone, past the relay, without touching a socket or a clock; the node's end of
 * `relay/wire/link.py`, where the handshake is drawn. See PROTOCOL.md, "Links".
 *
 * Same verbs as `session.js`. Frames carry the receiver's handle at the relay as `peer`; what comes in comes from the
 * peer the link was made for, whatever it says.
 */

import { encodePartialCall } from './calls.js';
import { CloseCode } from './close.js';
import { FrameTooLarge, RemoteProtocolError } from './errors.js';
import { decodeFrame, encodeFrame, FrameType, isCall, MAX_FRAME_BYTES, typeName } from './frames.js';
import { fromPayload, toPayload } from './messages.js';
import { HELLO_TIMEOUT_S, Moved, readCall } from './session.js';

export const BEAT_S = 2; // between two pings
const MISSED_PINGS = 2; // unanswered ones that end the link; a device may be busy for a beat of 2 s

/**
 * @typedef {{peer: number, epoch: number, key: Uint8Array<ArrayBuffer>, seal?: boolean}} LinkKey  seal: calls are sealed
 * @typedef {{type: 'LinkReady', link: string}} LinkReady
 * @typedef {LinkReady | import('./session.js').CallEvent | import('./session.js').Closed} LinkEvent
 * @typedef {(data: Uint8Array) => string} Sha256  lower-case hex
 */

/** One end of a link. */
export class LinkSession {
  /**
   * @param {number} now seconds
   * @param {object} options
   * @param {string} options.nonce  32 random hex digits
   * @param {string} options.link
   * @param {LinkKey} options.known
   * @param {boolean} options.opens  whether this end says hello
   * @param {Sha256} options.sha256
   */
  constructor(now, { nonce, link, known, opens, sha256 }) {
    /** @type {'start'|'greeting'|'proving'|'ready'|'closed'} */
    this.state = 'start';
    this.link = link;
    this.known = known;
    this.opens = opens;
    this.nonce = nonce;
    this.openerNonce = nonce;
    this.sha256 = sha256;
    /** @type {LinkEvent[]} */
    this._events = [];
    /** @type {Uint8Array<ArrayBuffer>[]} */
    this._outbox = [];
    /** @type {number|null} */
    this._deadline = now + HELLO_TIMEOUT_S;
    /** @type {number|null} */
    this._nextPing = null;
    this._missed = 0;
    this._moved = new Moved(now);
  }

  /** Say hello; for the opening end, once its transport is open. */
  start() {
    this._say({ type: 'LinkHello', link: this.link, nonce: this.nonce });
    this.state = 'greeting';
  }

  get ready() {
    return this.state === 'ready';
  }

  /**
   * Take one frame. Never throws.
   * @param {Uint8Array} bytes
   * @param {number} now
   */
  receiveData(bytes, now) {
    if (this.state === 'closed') return;
    this._missed = 0;
    try {
      if (bytes.length > MAX_FRAME_BYTES) throw new FrameTooLarge('message', bytes.length, MAX_FRAME_BYTES);
      this._receive(decodeFrame(bytes), now);
    } catch (error) {
      if (!(error instanceof RemoteProtocolError)) throw error;
      this.close(error.closeCode, error.message);
    }
  }

  /** Learn that the transport ended. @param {string} reason */
  receiveClose(reason) {
    this._end(CloseCode.NO_STATUS, reason, true);
  }

  events() {
    const events = this._events;
    this._events = [];
    return events;
  }

  dataToSend() {
    const outbox = this._outbox;
    this._outbox = [];
    return outbox;
  }

  /** @param {bigint} callId @param {number} epoch @param {import('./calls.js').Partial} partial */
  sendPartial(callId, epoch, partial) {
    this._call(FrameType.PARTIAL, encodePartialCall(partial), callId, epoch);
  }

  /** @param {bigint} callId @param {number} epoch @param {Omit<import('./messages.js').Failure, 'type'>} failure */
  sendFailure(callId, epoch, failure) {
    this._call(FrameType.FAILURE, toPayload({ type: 'Failure', ...failure }), callId, epoch);
  }

  /** @param {bigint} callId @param {number} epoch @param {number} answerBytes */
  sendEcho(callId, epoch, answerBytes) {
    this._call(FrameType.ECHO, new Uint8Array(answerBytes), callId, epoch);
  }

  /** Say Bye and end. Idempotent. @param {number} code @param {string} reason */
  close(code, reason) {
    if (this.state === 'closed') return;
    this._say({ type: 'Bye', code, reason: reason.slice(0, 500) });
    this._end(code, reason, false);
  }

  nextTimer() {
    if (this.state === 'closed') return null;
    const timers = [this._deadline, this._nextPing].filter((at) => at !== null);
    return timers.length ? Math.min(...timers) : null;
  }

  /** @param {number} now @param {number} [movedBytes]  what the transport has moved so far */
  handleTimer(now, movedBytes = 0) {
    if (this.state === 'closed') return;
    if (this._nextPing !== null && now >= this._nextPing && this._moved.alive(movedBytes, now)) this._missed = 0;
    if (this._deadline !== null && now >= this._deadline) {
      this.close(CloseCode.TIMEOUT, `no greeting within ${HELLO_TIMEOUT_S} s`);
    } else if (this._nextPing !== null && now >= this._nextPing) {
      if (this._missed >= MISSED_PINGS) {
        this.close(CloseCode.TIMEOUT, `nothing heard, ${this._missed} pings`);
        return;
      }
      this._missed += 1;
      this._say({ type: 'Ping', t: now * 1000 });
      this._nextPing = now + BEAT_S;
    }
  }

  /** @param {import('./frames.js').Frame} frame @param {number} now */
  _receive(frame, now) {
    const { type } = frame;
    const expected =
      type === FrameType.BYE ||
      (this.state === 'start' && !this.opens && type === FrameType.LINK_HELLO) ||
      ((this.opens ? this.state === 'greeting' : this.state === 'proving') && type === FrameType.LINK_PROOF) ||
      (this.ready && (INCOMING.has(type) || type === FrameType.PING || type === FrameType.PONG));
    if (!expected) throw new RemoteProtocolError(`${typeName(type)} is not expected in state ${this.state}`);
    if (isCall(type)) {
      this._events.push(readCall(frame, this.known.peer));
      return;
    }
    const message = fromPayload(type, frame.payload);
    switch (message.type) {
      case 'LinkHello':
        if (message.link !== this.link) {
          this.close(CloseCode.AUTH, 'no such link is expected here');
          return;
        }
        this.openerNonce = message.nonce;
        this._say({ type: 'LinkProof', nonce: this.nonce, mac: this._mac('accept', this.nonce) });
        this.state = 'proving';
        break;
      case 'LinkProof': {
        const nonce = this.opens ? message.nonce : this.nonce;
        if (message.mac !== this._mac(this.opens ? 'accept' : 'open', nonce)) {
          this.close(CloseCode.AUTH, 'the other end does not know the key of this link');
          return;
        }
        if (this.opens) this._say({ type: 'LinkProof', nonce, mac: this._mac('open', nonce) });
        this.state = 'ready';
        this._deadline = null;
        this._nextPing = now + BEAT_S;
        this._events.push({ type: 'LinkReady', link: this.link });
        break;
      }
      case 'Ping': this._say({ type: 'Pong', t: message.t }); break;
      case 'Bye': this._end(message.code, message.reason, true); break;
      default: // a Pong: it was heard
    }
  }

  /** @param {'open'|'accept'} end @param {string} acceptorNonce */
  _mac(end, acceptorNonce) {
    const text = `${end} ${this.link} ${this.openerNonce} ${acceptorNonce}`;
    return hmac(this.sha256, this.known.key, new TextEncoder().encode(text));
  }

  /** @param {import('./messages.js').ControlMessage} message */
  _say(message) {
    const types = { LinkHello: FrameType.LINK_HELLO, LinkProof: FrameType.LINK_PROOF, Ping: FrameType.PING };
    const others = { Pong: FrameType.PONG, Bye: FrameType.BYE };
    const type = /** @type {Record<string, number>} */ ({ ...types, ...others })[message.type];
    this._outbox.push(encodeFrame({ type, payload: toPayload(message) }));
  }

  /** @param {number} type @param {Uint8Array} payload @param {bigint} callId @param {number} epoch */
  _call(type, payload, callId, epoch) {
    if (this.ready) this._outbox.push(encodeFrame({ type, payload, peer: this.known.peer, callId, epoch }));
  }

  /** @param {number} code @param {string} reason @param {boolean} byPeer */
  _end(code, reason, byPeer) {
    if (this.state === 'closed') return;
    this.state = 'closed';
    this._events.push({ type: 'Closed', code, reason, byPeer });
  }
}

/** @type {Set<number>} */
const INCOMING = new Set([FrameType.DISPATCH, FrameType.CANCEL, FrameType.PROBE]);

/**
 * HMAC-SHA256 (RFC 2104) by a hash function: pages on plain http have no WebCrypto.
 * @param {Sha256} sha256
 * @param {Uint8Array} key  at most 64 bytes
 * @param {Uint8Array} text
 */
export function hmac(sha256, key, text) {
  const pad = (/** @type {number} */ byte, /** @type {Uint8Array} */ rest) => {
    const block = new Uint8Array(64 + rest.length).fill(byte, 0, 64);
    key.forEach((value, i) => (block[i] ^= value));
    block.set(rest, 64);
    return block;
  };
  return sha256(pad(0x5c, unhex(sha256(pad(0x36, text)))));
}

/** @param {string} text @returns {Uint8Array<ArrayBuffer>} */
export function unhex(text) {
  return Uint8Array.from({ length: text.length / 2 }, (_, i) => parseInt(text.slice(2 * i, 2 * i + 2), 16));
}
