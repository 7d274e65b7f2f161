/**
 * Messages over a WebRTC data channel to the backbone.
 *
 * RTCPeerConnection exists on the page's own thread only, the node lives in a worker: `RtcHost` runs on the page and
 * `RtcTransport` in the worker, with a MessagePort between them. Messages are one stream of bytes on the channel. They
 * are sent in packets of 4 KB: Chromium's SCTP sends at most four packets for each `send`, so that 12 KB in one call
 * take two round trips and in three calls take one.
 */

import { Assembler, SendQueue } from '../wire/pieces.js';
import { Reassembler } from '../wire/stream.js';
import { Candidates } from './candidates.js';

export const PACKET_BYTES = 4096;
export const MAX_BUFFERED_BYTES = 2 ** 18; // what the channel holds, nothing can overtake any more
export const LOW_BYTES = 2 ** 17;
export const MAX_WAITING_BYTES = 32 * 2 ** 20; // two of the largest frames; beyond this nobody reads
const ABNORMAL = 1006;

/**
 * @typedef {import('./transport.js').TransportHandlers} TransportHandlers
 * @typedef {import('./transport.js').Transport} Transport
 * @typedef {(kind: string, data: Record<string, string>) => void} Say
 */

/** The worker's end. @implements {Transport} */
export class RtcTransport {
  /**
   * @param {MessagePort} port  to the host
   * @param {TransportHandlers} handlers
   * @param {Say} say  tells the backbone, through the relay
   */
  constructor(port, handlers, say) {
    this.path = 'webrtc';
    this.bytesSent = 0;
    this.bytesReceived = 0;
    this.port = port;
    /** @type {TransportHandlers|null} */
    this.handlers = handlers;
    this.movedBytes = 0;
    const stream = new Reassembler();
    const assembler = new Assembler();
    port.onmessage = ({ data }) => {
      if (data instanceof ArrayBuffer) {
        this.bytesReceived += data.byteLength;
        this.movedBytes += data.byteLength;
        try {
          for (const message of stream.feed(new Uint8Array(data))) {
            const frame = assembler.feed(message, performance.now() / 1000);
            if (frame !== null) this.handlers?.onMessage(frame.buffer);
          }
        } catch (error) {
          this.ended(String(error));
        }
      } else if (data.type === 'say') say(data.kind, data.data);
      else if (data.type === 'open') this.handlers?.onOpen();
      else if (data.type === 'closed') this.ended(data.reason);
    };
  }

  /** @param {string} candidate @param {string} mid */
  candidate(candidate, mid) {
    this.port.postMessage({ type: 'candidate', candidate, mid });
  }

  /** @param {Uint8Array} data */
  send(data) {
    if (this.handlers === null) return;
    const whole = data.byteOffset === 0 && data.byteLength === data.buffer.byteLength;
    const buffer = /** @type {ArrayBuffer} */ (whole ? data.buffer : data.slice().buffer);
    this.bytesSent += buffer.byteLength;
    this.port.postMessage(buffer, [buffer]);
  }

  close() {
    this.handlers = null;
    this.port.postMessage({ type: 'close' });
  }

  /** @param {string} reason */
  ended(reason) {
    const handlers = this.handlers;
    this.close();
    handlers?.onClosed(ABNORMAL, reason);
  }
}

/** The page's end: one peer connection for each link. */
export class RtcHost {
  /** @param {typeof RTCPeerConnection} [Connection] another implementation, for tests */
  constructor(Connection = globalThis.RTCPeerConnection) {
    this.Connection = Connection;
    /** @type {Set<RTCPeerConnection>} */
    this.open = new Set();
  }

  /** Whether this browser has data channels. */
  get able() {
    return this.Connection !== undefined;
  }

  /**
   * Answer an offer; everything else goes through the port.
   * @param {{sdp: string, stun: string|undefined, port: MessagePort}} offer
   */
  async answer({ sdp, stun, port }) {
    const connection = new this.Connection({ iceServers: stun ? [{ urls: `stun:${stun}` }] : [] });
    this.open.add(connection);
    const end = (/** @type {string} */ reason) => {
      if (!this.open.delete(connection)) return;
      connection.close();
      port.postMessage({ type: 'closed', reason });
    };
    const say = (/** @type {string} */ kind, /** @type {object} */ data) => port.postMessage({ type: 'say', kind, data });
    /** @type {Outlet|null} */
    let outlet = null;
    connection.onicecandidate = ({ candidate }) => {
      if (candidate?.candidate) say('candidate', { candidate: candidate.candidate, mid: candidate.sdpMid ?? '' });
    };
    connection.onconnectionstatechange = () => {
      if (['failed', 'closed'].includes(connection.connectionState)) end('no way through');
    };
    connection.ondatachannel = ({ channel }) => {
      channel.binaryType = 'arraybuffer';
      outlet = new Outlet(channel, () => end('the backbone does not read'));
      channel.onmessage = ({ data }) => port.postMessage(data, data instanceof ArrayBuffer ? [data] : []);
      channel.onclose = () => end('the data channel was closed');
      if (channel.readyState === 'open') port.postMessage({ type: 'open' });
      else channel.onopen = () => port.postMessage({ type: 'open' });
    };
    const candidates = new Candidates();
    /** @type {RTCIceCandidateInit[]} */
    const early = [];
    let described = false;
    port.onmessage = ({ data }) => {
      if (data instanceof ArrayBuffer) outlet?.send(new Uint8Array(data));
      else if (data.type === 'close') end('closed here');
      else if (data.type === 'candidate' && candidates.take(data.candidate)) {
        const candidate = { candidate: data.candidate, sdpMid: data.mid };
        if (described) connection.addIceCandidate(candidate).catch(() => undefined);
        else early.push(candidate);
      }
    };
    try {
      await connection.setRemoteDescription({ type: 'offer', sdp: candidates.of(sdp) });
      described = true;
      for (const candidate of early) connection.addIceCandidate(candidate).catch(() => undefined);
      await connection.setLocalDescription();
      say('answer', { sdp: connection.localDescription?.sdp ?? '' });
    } catch (error) {
      end(String(error));
    }
  }

  /** End all: the worker is gone. */
  close() {
    for (const connection of this.open) connection.close();
    this.open.clear();
  }
}

/** Sends frames in packets and never over-fills the channel: what does not fit waits here, in its turn. */
export class Outlet {
  /**
   * @param {Pick<RTCDataChannel, 'send'|'bufferedAmount'|'bufferedAmountLowThreshold'|'onbufferedamountlow'|'readyState'>} channel
   * @param {() => void} onStuck  too much waits
   */
  constructor(channel, onStuck) {
    this.channel = channel;
    this.onStuck = onStuck;
    this.queue = new SendQueue();
    /** Of the message that is leaving. @type {Uint8Array<ArrayBuffer>[]} */
    this.packets = [];
    channel.bufferedAmountLowThreshold = LOW_BYTES;
    channel.onbufferedamountlow = () => this.drain();
  }

  /** @param {Uint8Array<ArrayBuffer>} frame */
  send(frame) {
    this.queue.put(frame);
    this.drain();
    if (this.queue.sizeBytes > MAX_WAITING_BYTES) this.onStuck();
  }

  drain() {
    while (this.channel.readyState === 'open' && this.channel.bufferedAmount + PACKET_BYTES <= MAX_BUFFERED_BYTES) {
      if (!this.packets.length) {
        const message = this.queue.pop();
        if (message === null) return;
        for (let at = 0; at < message.length; at += PACKET_BYTES) this.packets.push(message.subarray(at, at + PACKET_BYTES));
      }
      this.channel.send(/** @type {Uint8Array<ArrayBuffer>} */ (this.packets.shift()));
    }
  }
}
