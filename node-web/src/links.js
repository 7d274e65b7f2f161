/**
 * The node's end of links to its backbone: does what the backbone's signals ask, and owns what comes of it.
 * Mirrors `backbone/node/links.py`. Calls go to the same machine as those from the relay.
 */

import { messageOf } from './errors.js';
import { SealedPassage } from './transports/sealed.js';
import { CloseCode } from './wire/close.js';
import { HEADER_BYTES, isSealable } from './wire/frames.js';
import { LinkSession, unhex } from './wire/link.js';
import { linkSeal, SealBook } from './wire/seal.js';

/** All that others hear of an address somebody announced: nobody scans ports by us. */
const NOT_REACHED = 'not reached';
const MAX_LINKS = 8; // a backbone has one per lane
const KEY = /^[0-9a-f]{64}$/;

/**
 * @typedef {import('./transports/transport.js').Transport} Transport
 * @typedef {import('./transports/transport.js').TransportHandlers} TransportHandlers
 * @typedef {(kind: string, data: Record<string, string>) => void} Say
 * @typedef {Transport & {candidate: (candidate: string, mid: string) => void}} ChannelTransport
 *
 * @typedef {object} Ways  how this device can open links; what it cannot is missing
 * @property {(url: string, handlers: TransportHandlers) => Transport} [direct]  a WebSocket
 * @property {(offer: {sdp: string, stun: string|undefined}, handlers: TransportHandlers, say: Say) => ChannelTransport} [webrtc]
 *
 * @typedef {{session: LinkSession, transport: Transport, passage: SealedPassage, timer: ReturnType<typeof setTimeout>|undefined}} Link
 */

/** All links of one node. */
export class NodeLinks {
  /**
   * @param {object} options
   * @param {Ways} options.ways
   * @param {() => number} options.clock
   * @param {(link: Link, event: import('./wire/session.js').CallEvent) => void} options.onEvent
   * @param {(peer: number, epoch: number, signal: Omit<import('./wire/messages.js').Signal, 'type'>) => void} options.signal
   * @param {(data: Uint8Array) => string} options.sha256
   */
  constructor({ ways, clock, onEvent, signal, sha256 }) {
    this.ways = ways;
    this.clock = clock;
    this.onEvent = onEvent;
    this.signal = signal;
    this.sha256 = sha256;
    /** @type {Map<string, Link>} */
    this.links = new Map();
    this.endedIn = 0; // bytes of links that ended
    this.endedOut = 0;
  }

  get bytesReceived() {
    return [...this.links.values()].reduce((sum, { transport }) => sum + transport.bytesReceived, this.endedIn);
  }

  get bytesSent() {
    return [...this.links.values()].reduce((sum, { transport }) => sum + transport.bytesSent, this.endedOut);
  }

  /** What the Offer says. @returns {string[]} */
  get lanes() {
    return Object.keys(this.ways);
  }

  /** @param {import('./wire/session.js').SignalReceived} received */
  signalled({ peer, epoch, signal: { kind, link: id, data } }) {
    const say = (/** @type {string} */ answer, /** @type {Record<string, string>} */ values) => {
      this.signal(peer, epoch, { kind: answer, link: id, data: values });
    };
    if (kind === 'candidate') {
      const transport = /** @type {Partial<ChannelTransport>|undefined} */ (this.links.get(id)?.transport);
      transport?.candidate?.(data.candidate ?? '', data.mid ?? '');
      return;
    }
    if (!KEY.test(data.key ?? '') || this.links.has(id)) return;
    const known = { peer, epoch, key: unhex(data.key), seal: data.seal === '1' };
    const { direct, webrtc } = this.ways;
    try {
      if (this.links.size >= MAX_LINKS) throw new Error('there are too many links');
      if (kind === 'dial' && direct !== undefined) {
        this.open(id, known, true, say, (handlers) => direct(data.url ?? '', handlers));
      } else if (kind === 'offer' && webrtc !== undefined) {
        const offer = { sdp: data.sdp ?? '', stun: data.stun };
        this.open(id, known, false, say, (handlers) => webrtc(offer, handlers, say));
      } else throw new Error(`${kind} is not possible here`);
    } catch (error) {
      const why = kind === 'dial' && direct !== undefined ? NOT_REACHED : messageOf(error);
      say('failed', { reason: why.slice(0, 200) });
    }
  }

  /**
   * @param {string} id
   * @param {import('./wire/link.js').LinkKey} known
   * @param {boolean} opens
   * @param {Say} say
   * @param {(handlers: TransportHandlers) => Transport} make
   */
  open(id, known, opens, say, make) {
    const nonce = [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, '0')).join('');
    const session = new LinkSession(this.clock(), { nonce, link: id, known, opens, sha256: this.sha256 });
    const book = new SealBook();
    const passage = new SealedPassage(book, {
      send: (data) => transport.send(data),
      receive: (data) => {
        if (typeof data !== 'string') session.receiveData(data, this.clock());
        this.pump(link);
      },
      refuse: (_, fault) => {
        session.close(fault.closeCode, fault.message); // nobody alters a link's frames by mistake: it is left
        this.pump(link);
      },
      stuck: (why) => {
        session.close(CloseCode.OVERLOADED, why);
        this.pump(link);
      },
    });
    if (known.seal) {
      book.expect(known.peer, known.epoch);
      passage.hold(linkSeal(id, known.key).then((seal) => book.put(known.peer, known.epoch, seal)));
    }
    const transport = make({
      onOpen: () => {
        if (opens) session.start();
        this.pump(link);
      },
      onMessage: (data) => {
        passage.incoming(typeof data === 'string' ? data : spokenBy(known.peer, new Uint8Array(data)));
      },
      onClosed: (_, reason) => {
        if (!session.ready) say('failed', { reason: opens ? NOT_REACHED : (reason || 'it could not be opened').slice(0, 200) });
        session.receiveClose(reason);
        this.pump(link);
      },
    });
    /** @type {Link} */
    const link = { session, transport, passage, timer: undefined };
    this.links.set(id, link);
    this.pump(link);
  }

  /** Handle events, write what is due, arm the timer. @param {Link} link */
  pump(link) {
    const { session } = link;
    for (const event of session.events()) {
      if (event.type === 'Closed') this.drop(link);
      else if (event.type !== 'LinkReady') this.onEvent(link, event);
    }
    this.write(link);
    clearTimeout(link.timer);
    const at = session.nextTimer();
    if (at !== null) {
      link.timer = setTimeout(() => {
        session.handleTimer(this.clock(), link.transport.movedBytes);
        this.pump(link);
      }, Math.max(0, at - this.clock()) * 1000);
    }
  }

  /** @param {Link} link */
  write(link) {
    for (const data of link.session.dataToSend()) link.passage.outgoing(data);
  }

  /** @param {Link} link */
  drop(link) {
    this.write(link);
    clearTimeout(link.timer);
    const { transport } = link;
    const { bytesSent } = transport;
    link.passage.afterSending(() => {
      this.endedOut += transport.bytesSent - bytesSent;
      transport.close(1000, '');
    });
    if (!this.links.delete(link.session.link)) return;
    this.endedIn += transport.bytesReceived;
    this.endedOut += bytesSent;
  }

  /** The pairing or the session is over. @param {string} reason */
  closeAll(reason) {
    for (const link of [...this.links.values()]) {
      link.session.close(CloseCode.GOING_AWAY, reason);
      this.drop(link);
    }
  }
}

/**
 * Nobody rewrote `peer` on a link's way; the book of seals goes by who speaks.
 * @param {number} peer
 * @param {Uint8Array<ArrayBuffer>} data
 */
function spokenBy(peer, data) {
  if (data.length >= HEADER_BYTES && isSealable(data[3])) new DataView(data.buffer, data.byteOffset).setUint32(12, peer, true);
  return data.buffer;
}
