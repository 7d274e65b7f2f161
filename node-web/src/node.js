/**
 * Decide what a node does next: a pure state machine, mirrored line for line by `backbone/node/machine.py`.
 *
 * The table of states, and what each event and effect means, stand there. Here events and effects are plain objects
 * with a `type` and the same fields in camelCase. Nothing here touches a socket, a clock, storage or the kernel;
 * the scenarios in `tests/vectors/node_machine.json` bind both machines.
 */

import { backoffS, Holdings } from './holdings.js';

export { backoffS };

export const PARALLEL_FETCHES = 4;
export const QUEUE_CALLS = 64;
export const RECONNECT_CAP_S = 3; // a relay that is back has its nodes and backbones again before anybody gives up
export const ANNOUNCE_S = 2; // while slices come in, those that can be called are told so often
export const SETTLED_S = 5; // a session that lasted this long starts the next backoff from the beginning
export const LEAVE_GRACE_S = 1.2; // accepted calls get this long before Bye
export const GOING_AWAY = 1001; // RFC 6455 §7.4.1

/** Close codes after which reconnecting unchanged cannot help (PROTOCOL.md "Close codes"). */
export const FINAL_CLOSES = new Map([
  [1009, 'this node sent a message larger than the relay takes'],
  [4400, 'the relay could not read what this node sent; one of the two needs an update'],
  [4401, 'the relay refused this identity'],
  [4409, 'this device joined again elsewhere (another tab or process with the same identity)'],
  [4413, 'this node sent a frame larger than the relay takes'],
  [4426, 'the relay speaks another protocol version; update this node'],
]);
export const OVERLOADED = 4429; // come back slowly

/**
 * @typedef {'CONNECTING'|'GREETED'|'OFFERED'|'ASSIGNED'|'SERVING'|'PAUSED'|'ASLEEP'|'DRAINING'|'CLOSED'} State
 *
 * @typedef {object} AssignedLayer
 * @property {number} layer
 * @property {Record<string, string>} experts  expert index -> slice id
 * @property {number} sliceBytes
 * @property {number} hiddenDim
 * @property {number[]} grids
 * @property {string} [refusal]  why this kernel cannot compute it, if it cannot
 * @property {number} [heldBytes]  what a slice takes in memory, if that is known before
 * @property {any} [body]  the driver's
 *
 * @typedef {{epoch: number, peer: number, modelTag: number, layers: AssignedLayer[]}} Assignment
 *
 * @typedef {object} Call
 * @property {number} peer
 * @property {number|bigint} callId
 * @property {number} epoch
 * @property {number} deadlineMs
 * @property {number} modelTag
 * @property {number} layer
 * @property {number} hiddenDim
 * @property {number} grid
 * @property {number} numTokens
 * @property {ArrayLike<number>} experts
 * @property {any} [body]  the driver's
 *
 * @typedef {{type: 'Start'} | {type: 'Welcomed'} | {type: 'PauseAsked'} | {type: 'ResumeAsked'} | {type: 'Woke'} | {type: 'NetworkChanged'} | {type: 'Unpaired'}
 *   | {type: 'KernelTested', build: string, gbPerS: number}
 *   | {type: 'KernelFault', reason: string}
 *   | {type: 'Assigned', assignment: Assignment}
 *   | {type: 'SliceLoaded', slice: string, heldBytes?: number}
 *   | {type: 'SliceFailed', slice: string, reason: string, kind?: import('./holdings.js').FailureKind, progress?: boolean}
 *   | {type: 'SlicesLost', slices: string[]}
 *   | {type: 'DispatchReceived', call: Call}
 *   | {type: 'CancelReceived', peer: number, callId: number|bigint}
 *   | {type: 'CallComputed', ticket: number, result: any}
 *   | {type: 'CallFailed', ticket: number, code: string, message: string}
 *   | {type: 'LeaveAsked', reason: string}
 *   | {type: 'SleepAsked', reason: string}
 *   | {type: 'DrainReceived', reconnectAfterS: number}
 *   | {type: 'Closed', code: number, reason: string}} NodeEvent
 *
 * @typedef {{type: 'FetchSlice', slice: string, layer: number, sizeBytes: number}} FetchSlice
 * @typedef {{type: 'TestKernel'} | FetchSlice
 *   | {type: 'Connect', resume: boolean}
 *   | {type: 'Disconnect', code: number, reason: string}
 *   | {type: 'SendOffer', inventory: string[], memoryBytes: number}
 *   | {type: 'SendReady', epoch: number, experts: Record<string, number[]>, refused: Record<string, number[]>, why: string}
 *   | {type: 'SendPause', paused: boolean}
 *   | {type: 'SendBye', code: number, reason: string}
 *   | {type: 'StopFetch', slice: string}
 *   | {type: 'FreeSlice', slice: string}
 *   | {type: 'Compute', ticket: number, call: Call}
 *   | {type: 'Reply', call: Call, result: any}
 *   | {type: 'SendFailure', peer: number, callId: number|bigint, epoch: number, code: string, message: string,
 *      phase: string, layer: number, expert: number|null}} Effect
 *
 * @typedef {{memoryBytes: number, threads: number, queueCalls: number, parallelFetches: number}} NodeConfig
 * @typedef {{call: Call, expiresAt: number|null, cancelled: boolean}} Accepted
 */

/** Wait before connecting again after a session, or a try, that ended with `code`. @param {number} code @param {number} attempt @param {number} jitter */
export function reconnectS(code, attempt, jitter) {
  return code === OVERLOADED ? backoffS(10, jitter) : backoffS(attempt, jitter, RECONNECT_CAP_S);
}

/** One node. */
export class NodeMachine {
  /**
   * @param {Partial<NodeConfig> & {memoryBytes: number}} config what the owner allows
   * @param {() => number} random numbers in [0, 1) for the jitter
   */
  constructor(config, random) {
    /** @type {NodeConfig} */
    this.config = { threads: 1, queueCalls: QUEUE_CALLS, parallelFetches: PARALLEL_FETCHES, ...config };
    this.counters = { calls: 0, rows: 0, failed: 0, cancelled: 0, expired: 0, sessions: 0 };
    /** @type {string|null} */
    this.closedReason = 'not started';
    this.connected = false; // a session exists or is being opened
    /** @type {{build: string, gbPerS: number}|null} */
    this.kernel = null;
    this.paused = false;
    this.asleep = false;
    this.draining = false;
    /** @type {Assignment|null} */
    this.assignment = null;
    this.holdings = new Holdings(this.config.memoryBytes, this.config.parallelFetches, random);
    this.random = random;
    /** @type {number|null} */
    this.welcomedAt = null;
    /** @type {number|null} */
    this.connectAt = null;
    /** @type {number|null} */
    this.leaveAt = null;
    this.reconnectAfterS = 0;
    this.attempt = 0;
    /** @type {number|null} in this session */
    this.offeredBytes = null;
    this.announcedAt = 0;
    /** @type {string|null} */
    this.readySent = null;
    /** @type {Accepted[]} */
    this.queue = [];
    /** @type {Map<number, Accepted>} by ticket: peers and call ids begin anew with each session */
    this.running = new Map();
    this.tickets = 0;
    Object.seal(this); // a misspelt field fails
  }

  /** The state of the table, derived from the facts so that it cannot contradict them. @returns {State} */
  get state() {
    if (this.closedReason !== null) return 'CLOSED';
    if (this.draining) return 'DRAINING';
    if (this.asleep) return 'ASLEEP';
    if (this.welcomedAt === null) return 'CONNECTING';
    if (this.kernel === null) return 'GREETED';
    if (this.paused) return 'PAUSED';
    if (this.assignment === null || this.wanted.size === 0) return 'OFFERED';
    return [...this.wanted.keys()].every((s) => this.held.has(s)) ? 'SERVING' : 'ASSIGNED';
  }

  /** The slices that are in the kernel. */
  get held() {
    return this.holdings.held;
  }

  /** The slices we shall hold, in the order of fetching. */
  get wanted() {
    return this.holdings.wanted;
  }

  /** Layer -> experts that can be called now. @returns {Record<string, number[]>} */
  ready() {
    return this.holdings.ready();
  }

  /** When `handleTimer` wants to be called, if ever. @returns {number|null} */
  nextTimer() {
    const idle = this.welcomedAt === null || this.paused;
    const times = [this.connectAt, this.leaveAt, idle ? null : this.holdings.nextTimer()].filter((t) => t !== null);
    return times.length ? Math.min(...times) : null;
  }

  /** Do what is due. @param {number} now seconds @returns {Effect[]} */
  handleTimer(now) {
    /** @type {Effect[]} */
    const effects = [];
    if (this.leaveAt !== null && now >= this.leaveAt) return this.bye('grace for accepted calls is over');
    if (this.connectAt !== null && now >= this.connectAt) {
      this.connectAt = null;
      effects.push(this.connect());
    }
    return [...effects, ...this.fetchMore(now)];
  }

  /** Take one event in, give the effects to carry out, in order. @param {NodeEvent} event @param {number} now @returns {Effect[]} */
  receive(event, now) {
    if (event.type === 'Start') return this.start();
    if (event.type === 'LeaveAsked') return this.leave(event.reason, now);
    if (this.closedReason !== null) {
      return event.type === 'SliceLoaded' ? [{ type: 'FreeSlice', slice: event.slice }] : [];
    }
    switch (event.type) {
      case 'KernelTested': return this.kernelTested(event);
      case 'KernelFault': return this.kernelFault(event.reason);
      case 'Welcomed': return this.welcomed(now);
      case 'Assigned': return this.assigned(event.assignment, now);
      case 'SliceLoaded': return this.sliceLoaded(event, now);
      case 'SliceFailed': return this.sliceFailed(event, now);
      case 'SlicesLost': return this.slicesLost(event.slices, now);
      case 'DispatchReceived': return this.dispatch(event.call, now);
      case 'CancelReceived': return this.cancel(event.peer, event.callId, now);
      case 'CallComputed': return this.computed(event.ticket, event.result, now);
      case 'CallFailed': return this.failed(event, now);
      case 'PauseAsked': return this.pause(true, now);
      case 'ResumeAsked': return this.pause(false, now);
      case 'SleepAsked': return this.sleep(event.reason);
      case 'Woke': return this.woke();
      case 'NetworkChanged':
        if (this.connectAt !== null) this.connectAt = Math.min(this.connectAt, now + backoffS(0, this.random()));
        return [];
      case 'Unpaired':
        this.losePairing();
        return [];
      case 'DrainReceived': this.reconnectAfterS = event.reconnectAfterS; return [];
      case 'Closed': return this.closed(event.code, now);
    }
  }

  // --- session

  /** @returns {Effect[]} */
  start() {
    if (this.closedReason === null) return [];
    this.closedReason = null;
    this.draining = this.asleep = this.paused = false;
    this.attempt = 0;
    this.kernel = null;
    this.holdings.beginAnew();
    return [{ type: 'TestKernel' }, this.connect()];
  }

  /** @returns {Effect} */
  connect() {
    this.connected = true;
    return { type: 'Connect', resume: this.counters.sessions > 0 };
  }

  /** @param {number} now @returns {Effect[]} */
  welcomed(now) {
    this.welcomedAt = now;
    this.counters.sessions += 1;
    this.holdings.sessionBegan();
    return this.kernel !== null ? this.greet() : [];
  }

  /** @returns {Effect[]} */
  greet() {
    const effects = this.offer();
    if (this.paused) effects.push({ type: 'SendPause', paused: true });
    return effects;
  }

  /** What there is to offer, as soon as that is known. @returns {Effect[]} */
  offer() {
    if (this.welcomedAt === null || this.kernel === null) return [];
    this.offeredBytes = this.holdings.pledgeBytes;
    return [{ type: 'SendOffer', inventory: [...this.held].sort(), memoryBytes: this.offeredBytes }];
  }

  /** @param {{build: string, gbPerS: number}} tested @returns {Effect[]} */
  kernelTested({ build, gbPerS }) {
    const former = this.kernel;
    this.kernel = { build, gbPerS };
    if (former === null) return this.welcomedAt !== null ? this.greet() : [];
    if (former.build !== build) { // another kernel: what the relay was told is true no longer
      this.holdings.beginAnew();
      return this.offer();
    }
    const ratio = gbPerS / Math.max(former.gbPerS, 1e-9);
    return ratio > 0.5 && ratio < 2 ? [] : this.offer();
  }

  /** @param {string} reason @returns {Effect[]} */
  kernelFault(reason) {
    this.kernel = null;
    return this.end(`the kernel failed its known-answer test: ${reason}`, true);
  }

  /** Forget what belonged to the session; slices and fetched bytes stay. */
  loseSession() {
    this.connected = false;
    this.welcomedAt = this.offeredBytes = null;
    this.losePairing();
  }

  /** No backbone waits for our answers any more. */
  losePairing() {
    this.assignment = null;
    this.readySent = null;
    this.queue = [];
    for (const accepted of this.running.values()) accepted.cancelled = true;
  }

  /** @param {number} code @param {number} now @returns {Effect[]} */
  closed(code, now) {
    if (!this.connected) return [];
    const settled = this.welcomedAt !== null && now - this.welcomedAt >= SETTLED_S;
    this.loseSession();
    if (this.draining) return this.end('left');
    const final = FINAL_CLOSES.get(code);
    if (final !== undefined) return this.end(final);
    if (settled) this.attempt = 0;
    const jitter = this.random();
    const waitS = reconnectS(code, this.attempt, jitter);
    this.connectAt = now + Math.max(waitS, this.reconnectAfterS * (1 + jitter));
    this.reconnectAfterS = 0;
    this.attempt += 1;
    return [];
  }

  /** @param {string} reason @returns {Effect[]} */
  sleep(reason) {
    const effects = this.goodbye(reason);
    this.loseSession();
    this.connectAt = null;
    this.asleep = true;
    return effects;
  }

  /** @returns {Effect[]} */
  woke() {
    if (this.draining) return [];
    /** @type {Effect[]} */
    const effects = this.connected ? [{ type: 'Disconnect', code: GOING_AWAY, reason: 'woke up' }] : [];
    this.loseSession();
    this.asleep = false;
    this.connectAt = null;
    this.attempt = 0;
    this.kernel = null;
    return [...effects, { type: 'TestKernel' }, this.connect()];
  }

  /** Take no calls, and load nothing: whoever pauses may do so for the battery, or for the line. @param {boolean} paused @param {number} now @returns {Effect[]} */
  pause(paused, now) {
    if (paused === this.paused) return [];
    this.paused = paused;
    const said = this.welcomedAt !== null && this.kernel !== null;
    /** @type {Effect[]} */
    const effects = said ? [{ type: 'SendPause', paused }] : [];
    if (!paused) return [...effects, ...this.fetchMore(now)];
    return [...effects, ...this.holdings.stop()];
  }

  /** @param {string} reason @param {number} now @returns {Effect[]} */
  leave(reason, now) {
    if (this.closedReason !== null) return [];
    if (this.welcomedAt === null || !(this.queue.length || this.running.size)) return this.bye(reason);
    this.draining = true;
    this.leaveAt = now + LEAVE_GRACE_S;
    return this.paused ? [] : [{ type: 'SendPause', paused: true }]; // no new calls, please
  }

  /** Say Bye where somebody listens, and hang up. @param {string} reason @returns {Effect[]} */
  goodbye(reason) {
    /** @type {Effect[]} */
    const effects = [];
    if (this.welcomedAt !== null) effects.push({ type: 'SendBye', code: GOING_AWAY, reason });
    if (this.connected) effects.push({ type: 'Disconnect', code: GOING_AWAY, reason });
    return effects;
  }

  /** @param {string} reason @returns {Effect[]} */
  bye(reason) {
    const effects = this.goodbye(reason);
    return [...effects, ...this.end('left')];
  }

  /** @param {string} reason @param {boolean} [say] @returns {Effect[]} */
  end(reason, say = false) {
    /** @type {Effect[]} */
    const effects = say ? this.goodbye(reason) : [];
    this.loseSession();
    this.connectAt = this.leaveAt = null;
    this.draining = this.asleep = false;
    effects.push(...this.holdings.clear());
    this.closedReason = reason;
    return effects;
  }

  // --- slices

  /** @param {Assignment} assignment @param {number} now @returns {Effect[]} */
  assigned(assignment, now) {
    this.assignment = assignment;
    const effects = this.dropStaleCalls(assignment);
    effects.push(...this.holdings.assign(assignment.layers, assignment.modelTag));
    this.readySent = null;
    return [...effects, ...this.pledge(), ...this.announce(now), ...this.fetchMore(now)];
  }

  /** @param {number} now @returns {Effect[]} */
  fetchMore(now) {
    return this.welcomedAt === null || this.paused ? [] : this.holdings.fetchMore(now);
  }

  /** Offer anew when it turned out that less fits than we said. @returns {Effect[]} */
  pledge() {
    return this.offeredBytes === null || this.offeredBytes === this.holdings.pledgeBytes ? [] : this.offer();
  }

  /** @param {{slice: string, heldBytes?: number}} loaded @param {number} now @returns {Effect[]} */
  sliceLoaded({ slice, heldBytes = 0 }, now) {
    const { holdings } = this;
    if (!holdings.fetching.has(slice)) return this.held.has(slice) ? [] : [{ type: 'FreeSlice', slice }];
    const effects = [...holdings.loaded(slice, heldBytes), ...this.pledge()];
    const pause = holdings.fetching.size === 0; // nothing more for a while: only repetitions are left
    if (pause || holdings.complete(slice) || now - this.announcedAt >= ANNOUNCE_S) effects.push(...this.announce(now));
    return [...effects, ...this.fetchMore(now)];
  }

  /** @param {Parameters<Holdings['failed']>[0]} failed @param {number} now @returns {Effect[]} */
  sliceFailed(failed, now) {
    if (!this.holdings.fetching.has(failed.slice)) return [];
    return [...this.holdings.failed(failed, now), ...this.pledge(), ...this.announce(now), ...this.fetchMore(now)];
  }

  /** @param {string[]} slices @param {number} now @returns {Effect[]} */
  slicesLost(slices, now) {
    this.holdings.lost(slices);
    return [...this.announce(now), ...this.fetchMore(now)];
  }

  /** @param {number} now @returns {Effect[]} */
  announce(now) {
    if (this.assignment === null || this.welcomedAt === null) return [];
    const experts = this.ready();
    const refused = this.holdings.refused();
    const text = JSON.stringify([experts, refused]);
    if (text === this.readySent) return [];
    this.readySent = text;
    this.announcedAt = now;
    const why = Object.keys(refused).length ? this.holdings.why() : '';
    return [{ type: 'SendReady', epoch: this.assignment.epoch, experts, refused, why }];
  }

  // --- calls

  /** @param {Call} call @param {number} now @returns {Effect[]} */
  dispatch(call, now) {
    const alive = [...this.running.values()].filter((a) => !a.cancelled).concat(this.queue);
    if (alive.some((a) => sameCall(a.call, call.peer, call.callId))) return []; // the answer under way serves both
    const refusal = this.refusal(call);
    if (refusal !== null) return this.refuse(call, ...refusal);
    this.queue.push({ call, expiresAt: call.deadlineMs ? now + call.deadlineMs / 1000 : null, cancelled: false });
    return this.computeMore(now);
  }

  /** Failure code, message, expert, or null when the call is ours to answer. @param {Call} call @returns {[string, string, number|null]|null} */
  refusal(call) {
    const assignment = this.assignment;
    if (assignment === null) return ['stale_epoch', 'nothing is assigned to this node yet', null];
    if (call.epoch !== assignment.epoch) {
      return ['stale_epoch', `epoch ${call.epoch} is not the current ${assignment.epoch}`, null];
    }
    if (call.peer !== assignment.peer) return ['refused', 'we are not paired with this peer', null];
    if (this.paused || this.draining) {
      return ['refused', this.paused ? 'the owner paused this node' : 'this node is leaving', null];
    }
    const layer = this.holdings.layers.get(call.layer);
    if (call.modelTag !== assignment.modelTag || layer === undefined) {
      const tag = call.modelTag.toString(16).padStart(8, '0');
      return ['not_held', `layer ${call.layer} of model ${tag} is not assigned here`, null];
    }
    if (call.hiddenDim !== layer.hiddenDim || !layer.grids.includes(call.grid)) {
      return ['bad_frame', `hidden_dim or grid do not fit layer ${call.layer}`, null];
    }
    for (let i = 0; i < call.experts.length; i++) {
      const slice = layer.experts[call.experts[i]];
      if (slice === undefined || !this.held.has(slice)) {
        return ['not_held', `expert ${call.experts[i]} of layer ${call.layer} is not held`, call.experts[i]];
      }
    }
    if (this.queue.length >= this.config.queueCalls) {
      return ['overloaded', `${this.queue.length} calls are waiting here`, null];
    }
    return null;
  }

  /** @param {Call} call @param {string} code @param {string} message @param {number|null} expert @returns {Effect[]} */
  refuse(call, code, message, expert) {
    this.counters.failed += 1;
    return [failure(call, code, message, 'queue', expert)];
  }

  /** Refuse the waiting calls of a former epoch: their slices may be gone in a moment. @param {Assignment} assignment */
  dropStaleCalls(assignment) {
    const stale = this.queue.filter((accepted) => accepted.call.epoch !== assignment.epoch);
    this.queue = this.queue.filter((accepted) => accepted.call.epoch === assignment.epoch);
    return stale.flatMap((accepted) => this.refuse(accepted.call, 'stale_epoch', 'the assignment changed', null));
  }

  /** @param {number} now @returns {Effect[]} */
  computeMore(now) {
    /** @type {Effect[]} */
    const effects = [];
    while (this.running.size < this.config.threads) {
      const accepted = this.queue.shift();
      if (accepted === undefined) break;
      if (accepted.expiresAt !== null && now > accepted.expiresAt) {
        this.counters.expired += 1; // PROTOCOL.md: any hop may drop an expired frame
        continue;
      }
      this.tickets += 1;
      this.running.set(this.tickets, accepted);
      effects.push({ type: 'Compute', ticket: this.tickets, call: accepted.call });
    }
    if (this.draining && !this.queue.length && !this.running.size) {
      effects.push(...this.bye('all accepted calls are answered'));
    }
    return effects;
  }

  /** @param {number} peer @param {number|bigint} callId @param {number} now @returns {Effect[]} */
  cancel(peer, callId, now) {
    const waiting = this.queue.findIndex((a) => sameCall(a.call, peer, callId));
    if (waiting >= 0) {
      this.queue.splice(waiting, 1);
      this.counters.cancelled += 1;
      return this.computeMore(now);
    }
    for (const accepted of this.running.values()) {
      if (sameCall(accepted.call, peer, callId) && !accepted.cancelled) {
        accepted.cancelled = true;
        this.counters.cancelled += 1;
      }
    }
    return [];
  }

  /** @param {number} ticket @param {any} result @param {number} now @returns {Effect[]} */
  computed(ticket, result, now) {
    const accepted = this.running.get(ticket);
    this.running.delete(ticket);
    /** @type {Effect[]} */
    const effects = [];
    if (accepted !== undefined && !accepted.cancelled) {
      this.counters.calls += 1;
      this.counters.rows += accepted.call.numTokens;
      effects.push({ type: 'Reply', call: accepted.call, result });
    }
    return [...effects, ...this.computeMore(now)];
  }

  /** @param {{ticket: number, code: string, message: string}} event @param {number} now @returns {Effect[]} */
  failed({ ticket, code, message }, now) {
    const accepted = this.running.get(ticket);
    this.running.delete(ticket);
    /** @type {Effect[]} */
    const effects = [];
    if (accepted !== undefined && !accepted.cancelled) {
      this.counters.failed += 1;
      effects.push(failure(accepted.call, code, message, 'compute', null));
    }
    if (code === 'kernel_fault') effects.push({ type: 'TestKernel' }); // the call or the kernel? a failed test ends this node
    return [...effects, ...this.computeMore(now)];
  }
}

/** @param {Call} call @param {number} peer @param {number|bigint} callId */
function sameCall(call, peer, callId) {
  return call.peer === peer && call.callId === callId;
}

/** @param {Call} call @param {string} code @param {string} message @param {string} phase @param {number|null} expert @returns {Effect} */
function failure(call, code, message, phase, expert) {
  const { peer, callId, epoch, layer } = call;
  return { type: 'SendFailure', peer, callId, epoch, code, message, phase, layer, expert };
}
