/**
 * Decide what a node does next: a pure state machine, mirrored line for line by `backbone/node/machine.py`.
 *
 * The table of states, and what each event and effect means, stand there. Here events and effects are plain objects
 * with a `type` and the same fields in camelCase. Nothing here touches a socket, a clock, storage or the kernel;
 * the scenarios in `tests/vectors/node_machine.json` bind both machines.
 */

export const PARALLEL_FETCHES = 4;
export const QUEUE_CALLS = 64;
export const RETRY_BASE_S = 0.5;
export const RETRY_CAP_S = 30;
export const RECONNECT_CAP_S = 3; // a relay that is back has its nodes and backbones again before anybody gives up
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
 *   | {type: 'SliceLoaded', slice: string}
 *   | {type: 'SliceFailed', slice: string, reason: string}
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
 *   | {type: 'SendOffer', inventory: string[]}
 *   | {type: 'SendReady', epoch: number, experts: Record<string, number[]>}
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

/**
 * Wait before try `attempt` (0 = first repetition): exponential, capped, the upper half random.
 * @param {number} attempt
 * @param {number} jitter in [0, 1)
 * @param {number} [capS]
 */
export function backoffS(attempt, jitter, capS = RETRY_CAP_S) {
  return Math.min(capS, RETRY_BASE_S * 2 ** Math.min(attempt, 10)) * (0.5 + 0.5 * jitter);
}

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
    /** @type {Set<string>} */
    this.held = new Set();
    this.skipped = 0; // assigned slices beyond the pledge
    this.random = random;
    /** @type {number|null} */
    this.welcomedAt = null;
    /** @type {number|null} */
    this.connectAt = null;
    /** @type {number|null} */
    this.leaveAt = null;
    this.reconnectAfterS = 0;
    this.attempt = 0;
    /** @type {Map<string, FetchSlice>} in the order of fetching */
    this.wanted = new Map();
    /** @type {Set<string>} */
    this.fetching = new Set();
    /** @type {Map<string, {failures: number, at: number}>} */
    this.retries = new Map();
    /** @type {Map<number, AssignedLayer>} */
    this.layers = new Map();
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

  /** Layer -> experts that can be called now. @returns {Record<string, number[]>} */
  ready() {
    /** @type {Record<string, number[]>} */
    const layers = {};
    for (const layer of this.layers.values()) {
      const experts = expertsOf(layer).filter(([, s]) => this.held.has(s) && this.wanted.has(s)).map(([e]) => e);
      if (experts.length) layers[layer.layer] = experts;
    }
    return layers;
  }

  /** When `handleTimer` wants to be called, if ever. @returns {number|null} */
  nextTimer() {
    const times = [this.connectAt, this.leaveAt].filter((t) => t !== null);
    if (this.welcomedAt !== null && !this.paused && this.fetching.size < this.config.parallelFetches) {
      for (const [slice, { at }] of this.retries) if (!this.fetching.has(slice)) times.push(at);
    }
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
      case 'SliceLoaded': return this.sliceLoaded(event.slice, now);
      case 'SliceFailed': return this.sliceFailed(event.slice, now);
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
    return this.kernel !== null ? this.offer() : [];
  }

  /** @returns {Effect[]} */
  offer() {
    /** @type {Effect[]} */
    const effects = [{ type: 'SendOffer', inventory: [...this.held].sort() }];
    if (this.paused) effects.push({ type: 'SendPause', paused: true });
    return effects;
  }

  /** @param {{build: string, gbPerS: number}} tested @returns {Effect[]} */
  kernelTested({ build, gbPerS }) {
    const first = this.kernel === null;
    this.kernel = { build, gbPerS };
    return first && this.welcomedAt !== null ? this.offer() : [];
  }

  /** @param {string} reason @returns {Effect[]} */
  kernelFault(reason) {
    this.kernel = null;
    return this.end(`the kernel failed its known-answer test: ${reason}`, true);
  }

  /** Forget what belonged to the session; slices and fetched bytes stay. */
  loseSession() {
    this.connected = false;
    this.welcomedAt = null;
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
    for (const slice of [...this.fetching].sort()) effects.push({ type: 'StopFetch', slice });
    this.fetching.clear();
    return effects;
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
    for (const slice of [...this.fetching].sort()) effects.push({ type: 'StopFetch', slice });
    for (const slice of [...this.held].sort()) effects.push({ type: 'FreeSlice', slice });
    this.fetching.clear();
    this.held.clear();
    this.retries.clear();
    this.wanted.clear();
    this.layers.clear();
    this.closedReason = reason;
    return effects;
  }

  // --- slices

  /** @param {Assignment} assignment @param {number} now @returns {Effect[]} */
  assigned(assignment, now) {
    this.assignment = assignment;
    this.layers = new Map(assignment.layers.map((layer) => [layer.layer, layer]));
    this.wanted = this.withinPledge(assignment);
    const effects = this.dropStaleCalls(assignment);
    for (const slice of [...this.fetching].filter((s) => !this.wanted.has(s)).sort()) {
      this.fetching.delete(slice);
      effects.push({ type: 'StopFetch', slice });
    }
    for (const slice of [...this.held].filter((s) => !this.wanted.has(s)).sort()) {
      this.held.delete(slice);
      effects.push({ type: 'FreeSlice', slice });
    }
    for (const slice of [...this.retries.keys()]) if (!this.wanted.has(slice)) this.retries.delete(slice);
    this.readySent = null;
    return [...effects, ...this.announce(), ...this.fetchMore(now)];
  }

  /** The assigned slices in order, up to what the owner pledged; each slice counted once. @param {Assignment} assignment */
  withinPledge(assignment) {
    /** @type {Map<string, FetchSlice>} */
    const wanted = new Map();
    let used = 0;
    this.skipped = 0;
    for (const layer of assignment.layers) {
      for (const [, slice] of expertsOf(layer)) {
        if (wanted.has(slice)) continue;
        if (used + layer.sliceBytes > this.config.memoryBytes) {
          this.skipped += 1;
          continue;
        }
        used += layer.sliceBytes;
        wanted.set(slice, { type: 'FetchSlice', slice, layer: layer.layer, sizeBytes: layer.sliceBytes });
      }
    }
    return wanted;
  }

  /** @param {number} now @returns {Effect[]} */
  fetchMore(now) {
    if (this.welcomedAt === null || this.paused) return [];
    /** @type {Effect[]} */
    const effects = [];
    for (const [slice, fetch] of this.wanted) {
      if (this.fetching.size >= this.config.parallelFetches) break;
      const due = (this.retries.get(slice)?.at ?? now) <= now;
      if (!this.held.has(slice) && !this.fetching.has(slice) && due) {
        this.fetching.add(slice);
        effects.push(fetch);
      }
    }
    return effects;
  }

  /** @param {string} slice @param {number} now @returns {Effect[]} */
  sliceLoaded(slice, now) {
    if (!this.fetching.has(slice)) return this.held.has(slice) ? [] : [{ type: 'FreeSlice', slice }];
    this.fetching.delete(slice);
    this.retries.delete(slice);
    this.held.add(slice);
    const complete = [...this.layers.values()].map((layer) => Object.values(layer.experts))
      .some((ids) => ids.includes(slice) && ids.every((s) => this.held.has(s) || !this.wanted.has(s)));
    const pause = this.fetching.size === 0; // nothing more for a while: only repetitions are left
    return [...(complete || pause ? this.announce() : []), ...this.fetchMore(now)];
  }

  /** @param {string} slice @param {number} now @returns {Effect[]} */
  sliceFailed(slice, now) {
    if (!this.fetching.has(slice)) return [];
    this.fetching.delete(slice);
    const failures = this.retries.get(slice)?.failures ?? 0;
    this.retries.set(slice, { failures: failures + 1, at: now + backoffS(failures, this.random()) });
    return [...this.announce(), ...this.fetchMore(now)];
  }

  /** @param {string[]} slices @param {number} now @returns {Effect[]} */
  slicesLost(slices, now) {
    for (const slice of slices) this.held.delete(slice);
    return [...this.announce(), ...this.fetchMore(now)];
  }

  /** @returns {Effect[]} */
  announce() {
    if (this.assignment === null || this.welcomedAt === null) return [];
    const experts = this.ready();
    const text = JSON.stringify(experts);
    if (text === this.readySent) return [];
    this.readySent = text;
    return [{ type: 'SendReady', epoch: this.assignment.epoch, experts }];
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
    const layer = this.layers.get(call.layer);
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

/** Experts in the order of their numbers. @param {AssignedLayer} layer @returns {[number, string][]} */
function expertsOf(layer) {
  return Object.entries(layer.experts).map(([e, s]) => /** @type {[number, string]} */ ([Number(e), s]))
    .sort(([a], [b]) => a - b);
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
