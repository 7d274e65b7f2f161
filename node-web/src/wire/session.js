/**
 * Run a node's session without touching a socket or a clock; mirrors the client end of `relay/wire/session.py`.
 *
 *   driver:  session.receiveData(data, now) → for (const event of session.events()) → session.send…()
 *            → for (const data of session.dataToSend()) socket.send(data) → arm session.nextTimer()
 *
 * Events are the received messages (messages.js), the call events below and, last, `Closed`. A mistake of the relay
 * never escapes as an exception: the session queues a Bye, emits `Closed` and discards what follows. Our own mistakes
 * throw LocalProtocolError. `now` is in seconds.
 */

import { decodeDispatch, decodeProbe, encodePartialCall } from './calls.js';
import { CloseCode } from './close.js';
import { FrameTooLarge, LocalProtocolError, RemoteProtocolError, SealFault } from './errors.js';
import { decodeFrame, encodeFrame, FrameType, isCall, isSignal, MAX_FRAME_BYTES, typeName } from './frames.js';
import { fromPayload, MESSAGE_TYPES, toPayload } from './messages.js';

export const HELLO_TIMEOUT_S = 10;
export const PING_INTERVAL_S = 10;
export const MIN_BYTES_PER_S = 1000; // bytes of unfinished frames are a sign of life at this rate, not one a beat
export const MISSED_PINGS = 1; // unanswered for a whole beat: silence is noticed within two beats

/** @typedef {'start'|'greeting'|'open'|'ready'|'draining'|'closed'} State */

/**
 * @typedef {{type: 'DispatchReceived', peer: number, callId: bigint, epoch: number, deadlineMs: number,
 *   dispatch: import('./calls.js').Dispatch}} DispatchReceived
 * @typedef {{type: 'CancelReceived', peer: number, callId: bigint, epoch: number}} CancelReceived
 * @typedef {{type: 'FailureReceived', peer: number, callId: bigint, epoch: number,
 *   failure: import('./messages.js').Failure}} FailureReceived
 * @typedef {{type: 'CorruptReceived', frameType: number, peer: number, callId: bigint, epoch: number,
 *   error: RemoteProtocolError}} CorruptReceived  that call alone fails
 * @typedef {{type: 'ProbeReceived', peer: number, callId: bigint, epoch: number, answerBytes: number}} ProbeReceived
 * @typedef {{type: 'SignalReceived', peer: number, epoch: number,
 *   signal: import('./messages.js').Signal}} SignalReceived
 * @typedef {{type: 'SealReceived', peer: number, epoch: number,
 *   message: import('./messages.js').SealAnswer}} SealReceived  the backbone's half of the keys of our pairing
 * @typedef {{type: 'Closed', code: number, reason: string, byPeer: boolean}} Closed
 * @typedef {DispatchReceived|CancelReceived|FailureReceived|CorruptReceived|ProbeReceived} CallEvent
 * @typedef {import('./messages.js').ControlMessage|CallEvent|SignalReceived|SealReceived|Closed} Event
 */

const { SLICE_READY, PARTIAL, FAILURE, ECHO, PAUSE, OFFER, SIGNAL, SEAL_HELLO } = FrameType;
const { ASSIGN, DISPATCH, CANCEL, PROBE, PING, PONG, BYE, DRAIN, SEAL_ANSWER } = FrameType;
const SENDS = [OFFER, SLICE_READY, PARTIAL, FAILURE, ECHO, PAUSE, SIGNAL, SEAL_HELLO];
const RECEIVES = [ASSIGN, DISPATCH, CANCEL, FAILURE, PROBE, SIGNAL, SEAL_ANSWER];

/**
 * Who may say what in which state, and where that leads: `send`/`receive` -> frame type -> state.
 * @type {Record<State, {send: Map<number, State>, receive: Map<number, State>}>}
 */
export const NODE_TABLE = {
  start: {
    send: new Map([[FrameType.HELLO, 'greeting'], [BYE, 'closed']]),
    receive: new Map(),
  },
  greeting: row('greeting', [], [], [], [[FrameType.WELCOME, 'open']]),
  open: row('open', [], [], [[OFFER, 'ready']], [[DRAIN, 'draining']]),
  ready: row('ready', SENDS, RECEIVES, [], [[DRAIN, 'draining']]),
  draining: row('draining', SENDS, [...RECEIVES, DRAIN], [], []),
  closed: { send: new Map(), receive: new Map() },
};

/** A node's end. Hello → Welcome → Offer → Assign, Dispatch … */
export class NodeSession {
  /** @param {number} now seconds */
  constructor(now) {
    /** @type {State} */
    this.state = 'start';
    /** @type {Closed|null} */
    this.closed = null;
    /** @type {import('./messages.js').Welcome|null} */
    this.welcome = null;
    this.pingIntervalS = PING_INTERVAL_S;
    /** Round trip of the last Ping that was answered. @type {number|null} */
    this.rttMs = null;
    /** @type {Event[]} */
    this._events = [];
    /** @type {Uint8Array<ArrayBuffer>[]} */
    this._outbox = [];
    /** @type {number|null} */
    this._helloDeadline = now + HELLO_TIMEOUT_S;
    /** @type {number|null} */
    this._nextPing = null;
    this._lastHeard = now;
    this._missed = 0;
    this._moved = new Moved(now);
  }

  // -- what came in

  /**
   * Take one WebSocket message; text is a breach of the protocol. Never throws.
   * @param {ArrayBuffer|Uint8Array|string} data
   * @param {number} now
   */
  receiveData(data, now) {
    if (this.state === 'closed') return;
    this._lastHeard = now;
    this._missed = 0;
    try {
      if (typeof data === 'string') throw new RemoteProtocolError('a text message; frames are binary messages');
      const bytes = data instanceof Uint8Array ? data : new Uint8Array(data);
      if (bytes.length > MAX_FRAME_BYTES) throw new FrameTooLarge('message', bytes.length, MAX_FRAME_BYTES);
      const frame = decodeFrame(bytes);
      this._step('receive', frame.type);
      if (isCall(frame.type)) this._events.push(readCall(frame, frame.peer));
      else if (isSignal(frame.type)) this._receiveSignal(frame);
      else this._receiveControl(frame, now);
    } catch (error) {
      if (!(error instanceof RemoteProtocolError)) throw error;
      this.close(error.closeCode, error.message);
    }
  }

  /**
   * Take a call frame that seal.js refused: its call fails, the session lives.
   * @param {import('./frames.js').Frame} frame
   * @param {SealFault} error
   * @param {number} now
   */
  receiveFault({ type, peer, callId, epoch }, error, now) {
    if (this.state === 'closed') return;
    this._lastHeard = now;
    this._missed = 0;
    if (isCall(type)) this._events.push({ type: 'CorruptReceived', frameType: type, peer, callId, epoch, error });
  }

  /**
   * Learn that the transport ended, by the relay or by the network.
   * @param {number} code
   * @param {string} [reason]
   */
  receiveClose(code, reason = '') {
    this._end({ type: 'Closed', code, reason, byPeer: true });
  }

  /** What happened since last asked; `Closed` is the last event there is. */
  events() {
    const events = this._events;
    this._events = [];
    return events;
  }

  // -- what goes out

  /** The messages to write now, in order; empty means nothing. */
  dataToSend() {
    const outbox = this._outbox;
    this._outbox = [];
    return outbox;
  }

  /** @param {Omit<import('./messages.js').Hello, 'type'>} hello */
  sendHello(hello) {
    this._send({ type: 'Hello', ...hello });
  }

  /**
   * Say what we give; may be repeated when it changes.
   * @param {Omit<import('./messages.js').Offer, 'type'>} offer
   */
  sendOffer(offer) {
    this._send({ type: 'Offer', ...offer });
  }

  /**
   * @param {number} epoch
   * @param {import('./messages.js').Experts} experts
   * @param {import('./messages.js').Experts} [refused]  what this node will not load
   * @param {string} [why]
   */
  sendSliceReady(epoch, experts, refused, why) {
    this._send({ type: 'SliceReady', epoch, experts, refused, why });
  }

  /** @param {boolean} paused */
  sendPause(paused) {
    this._send({ type: 'Pause', paused });
  }

  /**
   * @param {number} peer
   * @param {bigint} callId
   * @param {number} epoch
   * @param {import('./calls.js').Partial} partial
   */
  sendPartial(peer, callId, epoch, partial) {
    this._sendFrame({ type: PARTIAL, payload: encodePartialCall(partial), peer, callId, epoch });
  }

  /**
   * @param {number} peer
   * @param {bigint} callId
   * @param {number} epoch
   * @param {Omit<import('./messages.js').Failure, 'type'>} failure
   */
  sendFailure(peer, callId, epoch, failure) {
    this._sendFrame({ type: FAILURE, payload: toPayload({ type: 'Failure', ...failure }), peer, callId, epoch });
  }

  /** Answer a probe. @param {number} peer @param {bigint} callId @param {number} epoch @param {number} answerBytes */
  sendEcho(peer, callId, epoch, answerBytes) {
    this._sendFrame({ type: ECHO, payload: new Uint8Array(answerBytes), peer, callId, epoch });
  }

  /**
   * Say something about links to the peer we are paired with.
   * @param {number} peer
   * @param {number} epoch
   * @param {Omit<import('./messages.js').Signal, 'type'>} signal
   */
  sendSignal(peer, epoch, signal) {
    this._sendFrame({ type: SIGNAL, payload: toPayload({ type: 'Signal', ...signal }), peer, epoch });
  }

  /**
   * Say our half of the keys of a pairing.
   * @param {number} peer
   * @param {number} epoch
   * @param {import('./messages.js').SealHello} hello
   */
  sendSeal(peer, epoch, hello) {
    this._sendFrame({ type: SEAL_HELLO, payload: toPayload(hello), peer, epoch });
  }

  /**
   * Leave on purpose.
   * @param {string} reason
   * @param {number} [code]
   */
  sendBye(reason, code = CloseCode.NORMAL) {
    if (!NODE_TABLE[this.state].send.has(BYE)) throw new LocalProtocolError(`cannot send BYE in state ${this.state}`);
    this.close(code, reason);
  }

  /**
   * End the session from this side: say Bye, emit `Closed`, discard what follows. Idempotent.
   * @param {number} code
   * @param {string} reason
   */
  close(code, reason) {
    if (this.closed !== null) return;
    const payload = toPayload({ type: 'Bye', code, reason: reason.slice(0, 500) });
    this._outbox.push(encodeFrame({ type: BYE, payload }));
    this._end({ type: 'Closed', code, reason, byPeer: false });
  }

  // -- time

  /** When `handleTimer` wants to be called, or null. */
  nextTimer() {
    if (this.state === 'closed') return null;
    const timers = [this._helloDeadline, this._nextPing].filter((at) => at !== null);
    return timers.length ? Math.min(...timers) : null;
  }

  /**
   * Do what is due: give up on a silent relay, or ask for a sign of life.
   * @param {number} now
   * @param {number} [movedBytes]  what the transport has moved so far
   */
  handleTimer(now, movedBytes = 0) {
    if (this.state === 'closed') return;
    if (this._nextPing !== null && now >= this._nextPing && this._moved.alive(movedBytes, now)) {
      this._lastHeard = now;
      this._missed = 0;
    }
    if (this._helloDeadline !== null && now >= this._helloDeadline) {
      this.close(CloseCode.TIMEOUT, `no greeting within ${HELLO_TIMEOUT_S} s`);
    } else if (this._nextPing !== null && now >= this._nextPing) {
      if (this._missed >= MISSED_PINGS) {
        this.close(CloseCode.TIMEOUT, `nothing heard for ${(now - this._lastHeard).toFixed(1)} s`);
        return;
      }
      this._missed += 1; // until something is heard
      this._send({ type: 'Ping', t: now * 1000 });
      this._nextPing = now + this.pingIntervalS;
    }
  }

  /**
   * Ask for a sign of life now and wait so long for it: this device's network is another than before.
   * @param {number} now
   * @param {number} patienceS
   * @param {number} [movedBytes]  what the transport has moved so far
   */
  checkAlive(now, patienceS, movedBytes = 0) {
    if (this._nextPing === null || this.state === 'closed') return;
    this._moved.alive(movedBytes, now); // only what moves from now on counts
    this._missed = MISSED_PINGS;
    this._send({ type: 'Ping', t: now * 1000 });
    this._nextPing = now + Math.min(patienceS, this.pingIntervalS);
  }

  // -- inside

  /** What cannot be read is the peer's fault, not the relay's: the session lives. @param {import('./frames.js').Frame} frame */
  _receiveSignal({ type, payload, peer, epoch, sealed }) {
    if (sealed) return; // we share no key
    try {
      if (type !== SIGNAL) {
        const message = /** @type {import('./messages.js').SealAnswer} */ (fromPayload(type, payload));
        this._events.push({ type: 'SealReceived', peer, epoch, message });
        return;
      }
      const signal = /** @type {import('./messages.js').Signal} */ (fromPayload(type, payload));
      this._events.push({ type: 'SignalReceived', peer, epoch, signal });
    } catch (error) {
      if (!(error instanceof RemoteProtocolError)) throw error;
    }
  }

  /**
   * @param {import('./frames.js').Frame} frame
   * @param {number} now
   */
  _receiveControl(frame, now) {
    const message = /** @type {import('./messages.js').ControlMessage} */ (fromPayload(frame.type, frame.payload));
    switch (message.type) {
      case 'Ping':
        this._send({ type: 'Pong', t: message.t });
        break;
      case 'Pong':
        this.rttMs = Math.max(0, now * 1000 - message.t);
        break;
      case 'Bye':
        this._end({ type: 'Closed', code: message.code, reason: message.reason, byPeer: true });
        break;
      case 'Welcome':
        this.welcome = message;
        this.pingIntervalS = message.pingIntervalS;
        this._helloDeadline = null;
        this._nextPing = now + this.pingIntervalS;
        this._events.push(message);
        break;
      default:
        this._events.push(message);
    }
  }

  /**
   * @param {'send'|'receive'} way
   * @param {number} type
   */
  _step(way, type) {
    const state = NODE_TABLE[this.state][way].get(type);
    if (state === undefined) {
      if (way === 'send') throw new LocalProtocolError(`cannot send ${typeName(type)} in state ${this.state}`);
      throw new RemoteProtocolError(`${typeName(type)} is not expected in state ${this.state}`);
    }
    this.state = state;
  }

  /** @param {import('./messages.js').ControlMessage} message */
  _send(message) {
    this._sendFrame({ type: MESSAGE_TYPES[message.type], payload: toPayload(message) });
  }

  /** @param {Parameters<typeof encodeFrame>[0]} frame */
  _sendFrame(frame) {
    const data = encodeFrame(frame);
    this._step('send', frame.type);
    this._outbox.push(data);
  }

  /** @param {Closed} closed */
  _end(closed) {
    if (this.closed !== null) return;
    this.state = 'closed';
    this.closed = closed;
    this._events.push(closed);
  }
}

/**
 * Whether a transport moves: how many bytes have come, or left a queue. A pong behind bulk is late, not missing; what
 * moves faster than a trickle is a sign of life.
 */
export class Moved {
  /** @param {number} now */
  constructor(now) {
    this.bytes = 0;
    this.at = now;
  }

  /** Since it was last asked. @param {number} bytes @param {number} now */
  alive(bytes, now) {
    const moved = bytes - this.bytes;
    const since = now - this.at;
    this.bytes = bytes;
    this.at = now;
    return moved > 0 && moved >= MIN_BYTES_PER_S * since;
  }
}

/**
 * Read a call frame that came from `peer`; a malformed payload fails that call alone.
 * @param {import('./frames.js').Frame} frame
 * @param {number} peer
 * @returns {CallEvent}
 */
export function readCall({ type, payload, callId, epoch, deadlineMs, sealed }, peer) {
  try {
    if (sealed) throw new SealFault('no_key', 'it is sealed, and we do not seal');
    switch (type) {
      case DISPATCH:
        return { type: 'DispatchReceived', peer, callId, epoch, deadlineMs, dispatch: decodeDispatch(payload) };
      case CANCEL:
        return { type: 'CancelReceived', peer, callId, epoch };
      case PROBE:
        return { type: 'ProbeReceived', peer, callId, epoch, answerBytes: decodeProbe(payload) };
      default: {
        const failure = /** @type {import('./messages.js').Failure} */ (fromPayload(type, payload));
        return { type: 'FailureReceived', peer, callId, epoch, failure };
      }
    }
  } catch (error) {
    if (!(error instanceof RemoteProtocolError)) throw error;
    return { type: 'CorruptReceived', frameType: type, peer, callId, epoch, error };
  }
}

/**
 * One row of the table: what keeps the state, what leads elsewhere, and what every live session may say.
 * @param {State} state
 * @param {number[]} sends
 * @param {number[]} receives
 * @param {[number, State][]} sendsTo
 * @param {[number, State][]} receivesTo
 */
function row(state, sends, receives, sendsTo, receivesTo) {
  /** @type {[number, State][]} */
  const always = [[PING, state], [PONG, state], [BYE, 'closed']];
  return {
    send: new Map([...always, ...sends.map((type) => /** @type {[number, State]} */ ([type, state])), ...sendsTo]),
    receive: new Map([...always, ...receives.map((type) => /** @type {[number, State]} */ ([type, state])), ...receivesTo]),
  };
}
