/**
 * Seal frames between this node and its backbone, so that the relay reads only what it forwards by; the node's end of
 * `relay/wire/seal.py`, where handshake and layout are drawn. See PROTOCOL.md, "Sealing".
 *
 * WebCrypto's answers come later: `seal` takes its counter when it is called, so frames are sealed side by side and sent
 * in order; `open` is to be called for one frame after the other. `transports/sealed.js` does both.
 */

import { LocalProtocolError, SealFault } from './errors.js';
import { decodeFrame, FLAG_SEALED, FrameType, HEADER_BYTES, isSealable, PIECE_BYTES, SEAL_BYTES, typeName } from './frames.js';
import { fromPayload } from './messages.js';

const SEAL_VERSION = 1;
const KEY_BYTES = 32;
export const KEY_FRAMES = 2 ** 20; // then the next key; see seal.py
export const KEY_MAX_BYTES = 2 ** 36;
const MAX_COUNTER = Number.MAX_SAFE_INTEGER;
export const KEYS_AHEAD = 4;
const LABEL = 'expertswarm seal 1 ';
const MAY_BE_BARE = new Set(['gone', 'overloaded', 'bad_seal']); // failures that the relay may report unsealed
const AES = 'AES-GCM';

/**
 * @typedef {{key: CryptoKey, public: Uint8Array<ArrayBuffer>}} SealIdentity  Ed25519: the signing key, the public one
 * @typedef {import('./messages.js').SealHello} SealHello
 * @typedef {import('./messages.js').SealAnswer} SealAnswer
 * @typedef {import('./frames.js').Frame} Frame
 */

/** Whether this place has what sealing needs; why not, in words, or null. @param {Crypto|undefined} crypto */
export async function whyNoSeal(crypto = globalThis.crypto) {
  if (crypto?.subtle === undefined) return 'this page is on plain http, where browsers have no WebCrypto';
  try {
    await crypto.subtle.generateKey('Ed25519', false, ['sign', 'verify']);
    await crypto.subtle.generateKey('X25519', false, ['deriveBits']);
    return null;
  } catch {
    return 'this browser has no Ed25519 or no X25519';
  }
}

/** Make an identity whose private key no script can read. @returns {Promise<SealIdentity>} */
export async function newIdentity() {
  const pair = /** @type {CryptoKeyPair} */ (await crypto.subtle.generateKey('Ed25519', false, ['sign', 'verify']));
  return { key: pair.privateKey, public: new Uint8Array(await crypto.subtle.exportKey('raw', pair.publicKey)) };
}

/** What people compare: 80 bits of the identity's SHA-256. @param {Uint8Array<ArrayBuffer>} identity */
export async function fingerprint(identity) {
  const digits = hex(new Uint8Array(await crypto.subtle.digest('SHA-256', identity))).slice(0, 20);
  return /** @type {RegExpMatchArray} */ (digits.match(/..../g)).join('-');
}

/** Compare two as people write them. @param {string} one @param {string} other */
export function sameFingerprint(one, other) {
  const plain = (/** @type {string} */ text) => text.replaceAll('-', '').toLowerCase();
  return plain(one) === plain(other);
}

/** The node's half: say `hello`, read the answer, have a Seal. */
export class NodeHandshake {
  /**
   * @param {object} parts
   * @param {number} parts.epoch
   * @param {SealIdentity} parts.identity
   * @param {Uint8Array<ArrayBuffer>} parts.backbone  its identity, as the relay named it
   * @param {CryptoKey} parts.ephemeral  X25519, used once
   * @param {Uint8Array<ArrayBuffer>} parts.ephemeralPublic
   * @param {SealHello} parts.hello
   */
  constructor(parts) {
    this.parts = parts;
    this.hello = parts.hello;
  }

  /**
   * @param {SealIdentity} identity
   * @param {number} epoch
   * @param {Uint8Array<ArrayBuffer>} backbone
   * @param {CryptoKeyPair} [ephemeral]  fresh random; tests give their own
   */
  static async begin(identity, epoch, backbone, ephemeral) {
    const pair = ephemeral ?? /** @type {CryptoKeyPair} */ (await crypto.subtle.generateKey('X25519', false, ['deriveBits']));
    const ephemeralPublic = new Uint8Array(await crypto.subtle.exportKey('raw', pair.publicKey));
    const text = agreement('node', epoch, identity.public, backbone, ephemeralPublic);
    const signature = new Uint8Array(await crypto.subtle.sign('Ed25519', identity.key, text));
    /** @type {SealHello} */
    const hello = { type: 'SealHello', identity: hex(identity.public), ephemeral: hex(ephemeralPublic), signature: hex(signature) };
    return new NodeHandshake({ epoch, identity, backbone, ephemeral: pair.privateKey, ephemeralPublic, hello });
  }

  /**
   * Read the backbone's answer. Throws SealFault when it is not from the identity that Assign named, or not for this hello.
   * @param {SealAnswer} answer
   */
  async finish(answer) {
    const { epoch, identity, backbone, ephemeral, ephemeralPublic } = this.parts;
    if (answer.identity !== hex(backbone)) {
      throw new SealFault('other_identity', 'the answer is of another backbone than the one assigned');
    }
    const theirs = unhex(answer.ephemeral);
    const text = agreement('backbone', epoch, identity.public, backbone, ephemeralPublic, theirs);
    if (!(await signedBy(backbone, unhex(answer.signature), text))) {
      throw new SealFault('unsigned', 'the backbone did not sign this: it was altered, or is of another pairing');
    }
    let secret;
    try {
      const key = await crypto.subtle.importKey('raw', theirs, 'X25519', false, []);
      secret = new Uint8Array(await crypto.subtle.deriveBits({ name: 'X25519', public: key }, ephemeral, 256));
    } catch {
      secret = new Uint8Array(KEY_BYTES);
    }
    // A point of small order: everybody would know the secret (RFC 7748 §6.1). Most browsers refuse by themselves.
    if (secret.every((byte) => byte === 0)) throw new SealFault('unsigned', 'the ephemeral key is of small order');
    return Seal.of(secret, text);
  }
}

/** @typedef {{bulk: Stream, express: Stream, long: Stream}} Streams */

/** The keys of one pairing, at the node's end: whole frames in, whole frames out. */
export class Seal {
  /**
   * @param {Streams} sealers
   * @param {Streams} openers
   * @param {(label: string) => Promise<Uint8Array<ArrayBuffer>>} derived
   */
  constructor(sealers, openers, derived) {
    this.sealers = sealers;
    this.openers = openers;
    this.derived = derived;
    this.gaps = 0; // frames of the backbone that never came
  }

  /** @param {Uint8Array<ArrayBuffer>} secret @param {Uint8Array<ArrayBuffer>} text  what was agreed on */
  static async of(secret, text) {
    const salt = new Uint8Array(await crypto.subtle.digest('SHA-256', text));
    const derived = (/** @type {string} */ label) => derive(secret, salt, label);
    const stream = async (/** @type {string} */ label) => new Stream(await derived(label));
    const streams = async (/** @type {string} */ role) => ({
      bulk: await stream(`${role} bulk`),
      express: await stream(`${role} express`),
      long: await stream(`${role} long`),
    });
    return new Seal(await streams('node'), await streams('backbone'), derived);
  }

  /**
   * Take a frame, give the sealed one.
   * @param {Uint8Array<ArrayBuffer>} data
   * @returns {Promise<Uint8Array<ArrayBuffer>>}
   */
  async seal(data) {
    const stream = this.sealers[streamOf(data[3], data.length - HEADER_BYTES + SEAL_BYTES)];
    const counter = stream.take(data.length - HEADER_BYTES);
    const sealed = new Uint8Array(data.length + SEAL_BYTES);
    const view = new DataView(sealed.buffer);
    sealed.set(data.subarray(0, HEADER_BYTES));
    view.setUint16(4, FLAG_SEALED, true);
    view.setUint32(8, sealed.length - HEADER_BYTES, true);
    const bound = boundTo(sealed);
    setCounter(view, HEADER_BYTES, counter);
    const key = await stream.key(Math.floor(counter / KEY_FRAMES));
    const how = { name: AES, iv: nonce(counter), additionalData: bound };
    sealed.set(new Uint8Array(await crypto.subtle.encrypt(how, key, data.subarray(HEADER_BYTES))), HEADER_BYTES + 8);
    return sealed;
  }

  /**
   * Take a sealed frame, give the frame that was sealed. Throws SealFault, and what does not open changes nothing.
   * @param {Uint8Array<ArrayBuffer>} data
   * @returns {Promise<Uint8Array<ArrayBuffer>>}
   */
  async open(data) {
    const stream = this.openers[streamOf(data[3], data.length - HEADER_BYTES)];
    const view = new DataView(data.buffer, data.byteOffset, data.length);
    const counter = view.getUint32(HEADER_BYTES, true) + view.getUint32(HEADER_BYTES + 4, true) * 2 ** 32;
    if (counter < stream.counter) throw new SealFault('repeated', `frame ${counter} of its stream came again, or late`);
    const number = Math.floor(counter / KEY_FRAMES);
    if (number > stream.number + KEYS_AHEAD || counter > MAX_COUNTER) {
      throw new SealFault('altered', `frame ${counter} is far ahead of its stream`);
    }
    const key = await stream.key(number);
    let payload;
    try {
      const how = { name: AES, iv: nonce(counter), additionalData: boundTo(data) };
      payload = new Uint8Array(await crypto.subtle.decrypt(how, key, data.subarray(HEADER_BYTES + 8)));
    } catch {
      throw new SealFault('altered', 'it does not open: altered on the way by the relay, or sealed for somebody else');
    }
    this.gaps += counter - stream.counter;
    stream.opened(counter);
    const opened = new Uint8Array(HEADER_BYTES + payload.length);
    opened.set(data.subarray(0, HEADER_BYTES));
    opened.set(payload, HEADER_BYTES);
    const head = new DataView(opened.buffer);
    head.setUint16(4, 0, true);
    head.setUint32(8, payload.length, true);
    return opened;
  }
}

/** The seal of a link past the relay; its key came sealed. @param {string} link @param {Uint8Array<ArrayBuffer>} key */
export function linkSeal(link, key) {
  return Seal.of(key, new TextEncoder().encode(`${LABEL}link\0${link}`));
}

/** Counter and keys of one stream. Each secret makes a key and the next secret. */
export class Stream {
  /** @param {Uint8Array<ArrayBuffer>} secret */
  constructor(secret) {
    this.counter = 0; // of the next frame, or the lowest one not used yet
    this.number = 0; // of the key in use
    this.bytes = 0;
    /** Secrets by number, from the one in use on. @type {Map<number, Promise<Uint8Array<ArrayBuffer>>>} */
    this.secrets = new Map([[0, Promise.resolve(secret)]]);
    /** @type {Map<number, Promise<CryptoKey>>} */
    this.keys = new Map();
  }

  /** The counter of the next frame to seal. @param {number} sizeBytes */
  take(sizeBytes) {
    if (this.bytes > KEY_MAX_BYTES) this.counter = (this.number + 1) * KEY_FRAMES;
    const counter = this.counter;
    if (counter > MAX_COUNTER) throw new LocalProtocolError('this stream has sealed all frames it may');
    this.counter = counter + 1;
    const number = Math.floor(counter / KEY_FRAMES);
    if (number !== this.number) this.bytes = 0;
    this.advance(number);
    this.bytes += sizeBytes;
    return counter;
  }

  /** @param {number} counter */
  opened(counter) {
    this.counter = counter + 1;
    this.advance(Math.floor(counter / KEY_FRAMES));
  }

  /** Forget the keys before this one, once it is certain that it is the one in use. @param {number} number */
  advance(number) {
    if (number === this.number) return;
    this.secret(number);
    for (const old of [...this.secrets.keys()]) if (old < number) this.secrets.delete(old);
    for (const old of [...this.keys.keys()]) if (old < number) this.keys.delete(old);
    this.number = number;
  }

  /** @param {number} number @returns {Promise<CryptoKey>} */
  key(number) {
    let key = this.keys.get(number);
    if (key === undefined) {
      key = this.secret(number)
        .then((secret) => derive(secret, new Uint8Array(0), 'key'))
        .then((raw) => crypto.subtle.importKey('raw', raw, AES, false, ['encrypt', 'decrypt']));
      this.keys.set(number, key);
    }
    return key;
  }

  /** @param {number} number @returns {Promise<Uint8Array<ArrayBuffer>>} */
  secret(number) {
    let secret = this.secrets.get(number);
    if (secret === undefined) {
      secret = this.secret(number - 1).then((last) => derive(last, new Uint8Array(0), 'next'));
      this.secrets.set(number, secret);
    }
    return secret;
  }
}

/** The seal with the one peer a node is paired with: what goes out and comes in passes here. */
export class SealBook {
  constructor() {
    /** @type {{peer: number, epoch: number, seal: Seal|null}|null} */
    this.pairing = null;
    this.sealed = 0;
    this.opened = 0;
    this.faults = 0;
  }

  /** From now on nothing unsealed passes between that peer and us. @param {number} peer @param {number} epoch */
  expect(peer, epoch) {
    this.pairing = { peer, epoch, seal: null };
  }

  /** @param {number} peer @param {number} epoch @param {Seal} seal */
  put(peer, epoch, seal) {
    this.pairing = { peer, epoch, seal };
  }

  forget() {
    this.pairing = null;
  }

  /** Take a frame of ours, give what to write. @param {Uint8Array<ArrayBuffer>} data @returns {Uint8Array<ArrayBuffer>|Promise<Uint8Array<ArrayBuffer>>} */
  outgoing(data) {
    const { pairing } = this;
    if (pairing === null || pairing.seal === null || !isSealable(data[3])) return data;
    const view = new DataView(data.buffer, data.byteOffset, data.length);
    if (view.getUint32(12, true) !== pairing.peer || view.getUint32(24, true) !== pairing.epoch) return data;
    this.sealed += 1;
    return pairing.seal.seal(data);
  }

  /**
   * Take what came, give what the session shall read. Throws or rejects with SealFault.
   * @param {Uint8Array<ArrayBuffer>} data
   * @returns {Uint8Array<ArrayBuffer>|Promise<Uint8Array<ArrayBuffer>>}
   */
  incoming(data) {
    if (data.length < HEADER_BYTES || !isSealable(data[3])) return data;
    let frame;
    try {
      frame = decodeFrame(data);
    } catch {
      return data; // the session says what is wrong with it
    }
    const { pairing } = this;
    const name = typeName(frame.type);
    if (!frame.sealed) {
      if (pairing?.peer !== frame.peer || mayBeBare(frame)) return data;
      throw this.fault(new SealFault('unsealed', `${name} came unsealed from a peer that seals`));
    }
    if (pairing === null || pairing.seal === null || pairing.peer !== frame.peer || pairing.epoch !== frame.epoch) {
      throw this.fault(new SealFault('no_key', `${name} is sealed and we share no key for its pairing`));
    }
    return this.counted(pairing.seal.open(data));
  }

  /** @param {Promise<Uint8Array<ArrayBuffer>>} opening */
  async counted(opening) {
    try {
      const opened = await opening;
      this.opened += 1;
      return opened;
    } catch (error) {
      throw error instanceof SealFault ? this.fault(error) : error;
    }
  }

  /** @param {SealFault} error */
  fault(error) {
    this.faults += 1;
    return error;
  }
}

/** @param {Frame} frame */
function mayBeBare({ type, payload }) {
  if (type !== FrameType.FAILURE) return false;
  try {
    const message = fromPayload(type, payload);
    return message.type === 'Failure' && MAY_BE_BARE.has(message.code);
  } catch {
    return false;
  }
}

/**
 * What overtakes others on the way has a counter of its own, and so have they.
 * @param {number} type @param {number} sealedBytes @returns {keyof Streams}
 */
function streamOf(type, sealedBytes) {
  if (type === FrameType.CANCEL || type === FrameType.FAILURE || type === FrameType.SIGNAL) return 'express';
  return sealedBytes > PIECE_BYTES ? 'long' : 'bulk';
}

/** The header with `peer` as 0: the relay rewrites that. @param {Uint8Array<ArrayBuffer>} data */
function boundTo(data) {
  return data.slice(0, HEADER_BYTES).fill(0, 12, 16);
}

/** @param {number} counter */
function nonce(counter) {
  const iv = new Uint8Array(12);
  setCounter(new DataView(iv.buffer), 4, counter);
  return iv;
}

/** @param {DataView} view @param {number} at @param {number} counter */
function setCounter(view, at, counter) {
  view.setUint32(at, counter % 2 ** 32, true);
  view.setUint32(at + 4, Math.floor(counter / 2 ** 32), true);
}

/** HKDF-SHA-256 (RFC 5869), 32 bytes. @param {Uint8Array<ArrayBuffer>} secret @param {Uint8Array<ArrayBuffer>} salt @param {string} label */
async function derive(secret, salt, label) {
  const key = await crypto.subtle.importKey('raw', secret, 'HKDF', false, ['deriveBits']);
  const how = { name: 'HKDF', hash: 'SHA-256', salt, info: new TextEncoder().encode(LABEL + label) };
  return new Uint8Array(await crypto.subtle.deriveBits(how, key, 8 * KEY_BYTES));
}

/** What an end signs; the backbone's is what all keys are made of. @param {'node'|'backbone'} role @param {number} epoch @param {Uint8Array[]} keys */
export function agreement(role, epoch, ...keys) {
  const label = new TextEncoder().encode(`${LABEL}${role}\0`);
  const text = new Uint8Array(label.length + 5 + KEY_BYTES * keys.length);
  text.set(label);
  const view = new DataView(text.buffer, label.length);
  view.setUint8(0, SEAL_VERSION);
  view.setUint32(1, epoch, true);
  keys.forEach((key, i) => text.set(key, label.length + 5 + KEY_BYTES * i));
  return text;
}

/** @param {Uint8Array<ArrayBuffer>} identity @param {Uint8Array<ArrayBuffer>} signature @param {Uint8Array<ArrayBuffer>} text */
async function signedBy(identity, signature, text) {
  try {
    const key = await crypto.subtle.importKey('raw', identity, 'Ed25519', false, ['verify']);
    return await crypto.subtle.verify('Ed25519', key, signature, text);
  } catch {
    return false; // no point of the curve
  }
}

/** @param {Uint8Array} bytes */
export function hex(bytes) {
  return [...bytes].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}

/** @param {string} text @returns {Uint8Array<ArrayBuffer>} */
export function unhex(text) {
  return Uint8Array.from({ length: text.length / 2 }, (_, i) => parseInt(text.slice(2 * i, 2 * i + 2), 16));
}
