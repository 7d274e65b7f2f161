/**
 * Decide what is sealed, the node's end; mirrors `NodeSealing` of `relay/wire/sealing.py`, where the rules are.
 *
 * Keys come later here (WebCrypto): `assigned` and `answered` give promises, and what they find out of date by then is
 * dropped. What comes in while `answered` works has to wait for it.
 */

import { fingerprint, hex, NodeHandshake, sameFingerprint, SealBook, unhex } from './seal.js';

export const RESEND_S = 2; // a hello may be lost when the backbone's session just ends or begins

/**
 * @typedef {'none'|'agreeing'|'sealed'|'unsealed'|'refused'} SealState
 *
 * @typedef {object} SealPolicy
 * @property {import('./seal.js').SealIdentity|null} identity  null: this page cannot seal
 * @property {string} why  it cannot
 * @property {string|null} [pinned]  fingerprint of the only backbone to work for
 */

/** For one session with the relay. `book` is what its frames pass. */
export class NodeSealing {
  /** @param {SealPolicy} policy */
  constructor(policy) {
    this.policy = policy;
    this.book = new SealBook();
    /** @type {SealState} */
    this.state = 'none';
    this.why = ''; // it is unsealed or refused
    /** Fingerprint of the backbone we are paired with, if it seals. @type {string|null} */
    this.backbone = null;
    this.pairing = '';
    /** @type {NodeHandshake|null} */
    this.handshake = null;
    /** @type {number|null} */
    this.resendAt = null;
    this.peer = 0;
    this.epoch = 0;
  }

  /** What an Offer says of it. @returns {{seal?: string}} */
  get offer() {
    return this.policy.identity === null ? {} : { seal: hex(this.policy.identity.public) };
  }

  /** Whether this Assign is of a pairing we know already. @param {import('./messages.js').Assign} assign */
  knows({ peer, epoch, seal }) {
    return this.pairing === `${peer}/${epoch}/${seal}`;
  }

  /**
   * Learn of a pairing: agree on keys if both ends seal. `say(hello)` is called once there is a hello to send.
   * @param {import('./messages.js').Assign} assign
   * @param {number} now
   * @param {(hello: import('./messages.js').SealHello) => void} say
   * @returns {Promise<void>}
   */
  async assigned(assign, now, say) {
    const { identity } = this.policy;
    if (assign.peer === 0 || assign.seal === undefined || identity === null) {
      this.drop();
      this.state = assign.peer === 0 ? 'none' : 'unsealed';
      if (assign.peer !== 0) this.why = identity === null ? this.policy.why : 'the backbone does not seal';
      return;
    }
    if (this.knows(assign)) return;
    this.drop();
    this.pairing = `${assign.peer}/${assign.epoch}/${assign.seal}`;
    this.peer = assign.peer;
    this.epoch = assign.epoch;
    this.state = 'agreeing';
    this.book.expect(assign.peer, assign.epoch);
    this.resendAt = now + RESEND_S;
    const handshake = await NodeHandshake.begin(identity, assign.epoch, unhex(assign.seal));
    const print = await fingerprint(unhex(assign.seal));
    if (!this.knows(assign)) return; // another pairing began meanwhile
    this.backbone = print;
    this.handshake = handshake;
    say(handshake.hello);
  }

  /**
   * Why we do not work for this backbone, or null. Only a page with a pinned key refuses.
   * @param {import('./messages.js').Assign} assign
   */
  async refusal(assign) {
    const { pinned = null, identity } = this.policy;
    if (assign.peer === 0 || pinned === null) return null;
    if (identity === null) return this.policy.why;
    const found = assign.seal === undefined ? 'missing' : await fingerprint(unhex(assign.seal));
    return sameFingerprint(found, pinned) ? null : `the backbone’s key is ${found}, not the pinned ${pinned}`;
  }

  /** @param {string} why */
  refuse(why) {
    this.drop();
    this.state = 'refused';
    this.why = why;
  }

  /**
   * Take the backbone's half; true when keys are agreed now. Rejects with SealFault: we go on asking.
   * @param {number} peer
   * @param {number} epoch
   * @param {import('./messages.js').SealAnswer} answer
   */
  async answered(peer, epoch, answer) {
    const { handshake } = this;
    if (handshake === null || peer !== this.peer || epoch !== this.epoch) return false;
    const seal = await handshake.finish(answer);
    if (handshake !== this.handshake) return false;
    this.book.put(peer, epoch, seal);
    this.handshake = null;
    this.resendAt = null;
    this.state = 'sealed';
    return true;
  }

  nextTimer() {
    return this.resendAt;
  }

  /** The hello to say again, if it is time. @param {number} now */
  handleTimer(now) {
    if (this.resendAt === null || now < this.resendAt) return null;
    this.resendAt = now + RESEND_S;
    return this.handshake?.hello ?? null;
  }

  drop() {
    this.book.forget();
    this.pairing = '';
    this.handshake = null;
    this.resendAt = null;
    this.backbone = null;
    this.why = '';
  }
}
