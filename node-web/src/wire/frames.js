/**
 * Encode and decode one frame: a 32-byte header and a payload, in one binary WebSocket message.
 * Mirrors `relay/wire/frames.py`, where the header is drawn. See PROTOCOL.md, "Frame".
 */

import { FrameTooLarge, LocalProtocolError, RemoteProtocolError, VersionMismatch } from './errors.js';

export const VERSION = 2;
export const HEADER_BYTES = 32;
const MAGIC = 0x5345; // "ES", little endian
export const FLAG_SEALED = 1; // the payload is sealed between node and backbone, see seal.js
export const SEAL_BYTES = 8 + 16; // what a sealed payload is longer: counter and tag
export const PIECE_BYTES = 32 * 1024; // longer payloads are cut, see pieces.js
export const PIECE_HEAD_BYTES = 12;

const KIB = 1 << 10;
const MIB = 1 << 20;

/** What a frame is. 1-15 pairing, 16-31 calls, 32-47 the session itself, 48-63 paths between peers. */
export const FrameType = Object.freeze({
  HELLO: 1,
  WELCOME: 2,
  OFFER: 3,
  REGISTER: 4,
  ASSIGN: 5,
  SLICE_READY: 6,
  PEERS: 7,
  SLICE_WANTED: 8,
  LINK_HELLO: 9,
  LINK_PROOF: 10,
  DISPATCH: 16,
  PARTIAL: 17,
  CANCEL: 18,
  FAILURE: 19,
  PROBE: 20,
  ECHO: 21,
  PIECE: 22,
  PING: 32,
  PONG: 33,
  DRAIN: 34,
  BYE: 35,
  PAUSE: 36,
  SIGNAL: 48,
  PATH_REPORT: 49,
  RECEIPT: 50,
  SEAL_HELLO: 51,
  SEAL_ANSWER: 52,
});

/** @type {Map<number, string>} */
const NAMES = new Map(Object.entries(FrameType).map(([name, type]) => [type, name]));

/** Longest payload per type; the types missing here are reserved. @type {Map<number, number>} */
export const PAYLOAD_LIMITS = new Map([
  [FrameType.HELLO, 16 * KIB],
  [FrameType.WELCOME, 16 * KIB],
  [FrameType.OFFER, 1280 * KIB], // 16384 slices held
  [FrameType.REGISTER, 16 * MIB],
  [FrameType.ASSIGN, 16 * MIB],
  [FrameType.SLICE_READY, 256 * KIB],
  [FrameType.PEERS, 16 * MIB],
  [FrameType.SLICE_WANTED, KIB],
  [FrameType.LINK_HELLO, KIB],
  [FrameType.LINK_PROOF, KIB],
  [FrameType.DISPATCH, 16 * MIB],
  [FrameType.PARTIAL, 16 * MIB],
  [FrameType.CANCEL, 0],
  [FrameType.FAILURE, 16 * KIB],
  [FrameType.PROBE, 256 * KIB],
  [FrameType.ECHO, 256 * KIB],
  [FrameType.PIECE, PIECE_HEAD_BYTES + PIECE_BYTES],
  [FrameType.PING, KIB],
  [FrameType.PONG, KIB],
  [FrameType.DRAIN, 4 * KIB],
  [FrameType.BYE, 4 * KIB],
  [FrameType.PAUSE, KIB],
  [FrameType.SIGNAL, 16 * KIB],
  [FrameType.PATH_REPORT, MIB],
  [FrameType.SEAL_HELLO, KIB],
  [FrameType.SEAL_ANSWER, KIB],
]);
export const MAX_FRAME_BYTES = HEADER_BYTES + 16 * MIB + SEAL_BYTES;
export const MAX_MESSAGE_BYTES = HEADER_BYTES + PIECE_HEAD_BYTES + PIECE_BYTES; // nothing longer is written in one message

/**
 * One frame. `peer`, `callId`, `epoch` and `deadlineMs` belong to calls and are 0 in control frames; a Signal,
 * SealHello or SealAnswer has `peer` and `epoch`.
 * @typedef {object} Frame
 * @property {number} type
 * @property {Uint8Array} payload
 * @property {number} peer  handle of the other end beyond the relay
 * @property {bigint} callId
 * @property {number} epoch
 * @property {number} deadlineMs  time left when it was sent; 0 means none
 * @property {boolean} sealed  the payload is what seal.js made of it
 */

/**
 * The name of a frame type, or its number where it has none.
 * @param {number} type
 */
export function typeName(type) {
  return NAMES.get(type) ?? String(type);
}

/**
 * Whether frames of this type are calls, which go to a peer beyond the relay.
 * @param {number} type
 */
export function isCall(type) {
  return type >= FrameType.DISPATCH && type <= FrameType.ECHO;
}

/** Whether frames of this type go to the peer beyond the relay ahead of calls. @param {number} type */
export function isSignal(type) {
  return type === FrameType.SIGNAL || type === FrameType.SEAL_HELLO || type === FrameType.SEAL_ANSWER;
}

/** Whether the two ends seal frames of this type. @param {number} type */
export function isSealable(type) {
  return isCall(type) || type === FrameType.SIGNAL;
}

/**
 * Return header and payload as one message; throws LocalProtocolError for what `decodeFrame` would refuse.
 * @param {Pick<Frame, 'type' | 'payload'> & Partial<Frame>} frame
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function encodeFrame({ type, payload, peer = 0, callId = 0n, epoch = 0, deadlineMs = 0, sealed = false }) {
  const plainLimit = PAYLOAD_LIMITS.get(type);
  if (plainLimit === undefined) {
    throw new LocalProtocolError(`${typeName(type)} frames are not negotiated in version ${VERSION}`);
  }
  const limit = plainLimit + (sealed ? SEAL_BYTES : 0);
  if (payload.length > limit) {
    throw new LocalProtocolError(`${typeName(type)}: payload of ${payload.length} bytes, at most ${limit} are allowed`);
  }
  if (sealed && (!isSealable(type) || payload.length < SEAL_BYTES)) {
    throw new LocalProtocolError(`${typeName(type)}: ${payload.length} bytes are no sealed payload`);
  }
  const fault = fieldFault(type, peer, callId, epoch, deadlineMs);
  if (fault !== null) throw new LocalProtocolError(fault);
  if (!isU32(peer) || !isU32(epoch) || !isU32(deadlineMs) || BigInt.asUintN(64, callId) !== callId) {
    throw new LocalProtocolError(`${typeName(type)}: a header field is out of range`);
  }
  const data = new Uint8Array(HEADER_BYTES + payload.length);
  const view = new DataView(data.buffer);
  view.setUint16(0, MAGIC, true);
  view.setUint8(2, VERSION);
  view.setUint8(3, type);
  view.setUint16(4, sealed ? FLAG_SEALED : 0, true);
  view.setUint32(8, payload.length, true);
  view.setUint32(12, peer, true);
  view.setBigUint64(16, callId, true);
  view.setUint32(24, epoch, true);
  view.setUint32(28, deadlineMs, true);
  data.set(payload, HEADER_BYTES);
  return data;
}

/**
 * Read one message; the payload is a view into it. Throws RemoteProtocolError for anything but exactly one frame.
 * @param {Uint8Array} data
 * @returns {Frame}
 */
export function decodeFrame(data) {
  if (data.length < HEADER_BYTES) {
    throw new RemoteProtocolError(`frame of ${data.length} bytes, a header alone has ${HEADER_BYTES}`);
  }
  const view = new DataView(data.buffer, data.byteOffset, data.length);
  if (view.getUint16(0, true) !== MAGIC) throw new RemoteProtocolError('no frame: it does not start with "ES"');
  const version = view.getUint8(2);
  if (version !== VERSION) throw new VersionMismatch(version, VERSION);
  const type = view.getUint8(3);
  const name = NAMES.get(type);
  if (name === undefined) throw new RemoteProtocolError(`unknown frame type ${type}`);
  const plainLimit = PAYLOAD_LIMITS.get(type);
  if (plainLimit === undefined) throw new RemoteProtocolError(`${name} frames are not negotiated in version ${VERSION}`);
  const flags = view.getUint32(4, true); // and what is reserved
  const sealed = flags === FLAG_SEALED && isSealable(type);
  if (flags !== 0 && !sealed) throw new RemoteProtocolError(`${name}: flags and reserved must be 0`);
  const limit = plainLimit + (sealed ? SEAL_BYTES : 0);
  const length = view.getUint32(8, true);
  if (sealed && length < SEAL_BYTES) throw new RemoteProtocolError(`${name}: ${length} bytes are no sealed payload`);
  if (length > limit) throw new FrameTooLarge(name, length, limit);
  if (length !== data.length - HEADER_BYTES) {
    throw new RemoteProtocolError(`${name}: header says ${length} bytes, ${data.length - HEADER_BYTES} came`);
  }
  const frame = {
    type,
    payload: data.subarray(HEADER_BYTES),
    peer: view.getUint32(12, true),
    callId: view.getBigUint64(16, true),
    epoch: view.getUint32(24, true),
    deadlineMs: view.getUint32(28, true),
    sealed,
  };
  const fault = fieldFault(type, frame.peer, frame.callId, frame.epoch, frame.deadlineMs);
  if (fault !== null) throw new RemoteProtocolError(fault);
  return frame;
}

/**
 * @param {number} type
 * @param {number} peer
 * @param {bigint} callId
 * @param {number} epoch
 * @param {number} deadlineMs
 */
function fieldFault(type, peer, callId, epoch, deadlineMs) {
  if (isCall(type)) {
    return peer && callId ? null : `${typeName(type)}: peer ${peer} and call_id ${callId} must not be 0`;
  }
  if (type === FrameType.PIECE && (peer !== 0 || callId !== 0n)) {
    return peer !== 0 && callId !== 0n ? null : 'PIECE: peer and call_id must both be 0 or both not';
  }
  if (isSignal(type)) {
    const addressed = peer !== 0 && callId === 0n && deadlineMs === 0;
    return addressed ? null : `${typeName(type)}: peer must not be 0, call_id and deadline_ms must be 0`;
  }
  const clean = peer === 0 && callId === 0n && epoch === 0 && deadlineMs === 0;
  return clean ? null : `${typeName(type)}: peer, call_id, epoch and deadline_ms must be 0 in a control frame`;
}

/** @param {number} value */
function isU32(value) {
  return Number.isInteger(value) && value >= 0 && value <= 0xffffffff;
}
