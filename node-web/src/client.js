/**
 * Run a node: the driver that carries out what `node.js` decides; mirrors `backbone/node/client.py`.
 *
 * The kernel and its experts are `host.js`'s; here are the session, what is sealed on it, and the links past the relay.
 * Transport, kernel and store are known by their interfaces only, so the tests run it in one process. A reply leaves in
 * the turn in which its computation ends.
 */

import { codeOf, messageOf } from './errors.js';
import { ExpertHost } from './host.js';
import { NodeLinks } from './links.js';
import { NodeMachine } from './node.js';
import { SealedPassage } from './transports/sealed.js';
import { modelTag } from './wire/calls.js';
import { clipReason, CloseCode, inWords } from './wire/close.js';
import { SealFault } from './wire/errors.js';
import { MAX_INVENTORY } from './wire/messages.js';
import { NodeSealing } from './wire/sealing.js';
import { NodeSession } from './wire/session.js';
import { refusal } from './work.js';

const ABNORMAL = 1006; // RFC 6455 §7.1.5
const CHECK_S = 3; // the relay's answer may take so long after the network changed
/** @type {import('./wire/sealing.js').SealPolicy} */
const NO_SEAL = { identity: null, why: 'sealing is switched off here' };

/**
 * @typedef {import('./transports/transport.js').Transport} Transport
 * @typedef {import('./node.js').Effect} Effect
 * @typedef {import('./node.js').NodeEvent} NodeEvent
 * @typedef {import('./wire/session.js').DispatchReceived} DispatchReceived
 * @typedef {{id: string, secret: string}} Identity
 *
 * @typedef {object} OwnOptions
 * @property {number} memoryBytes  the pledge
 * @property {string} name
 * @property {string} agent
 * @property {Identity} identity
 * @property {{battery: number|null, metered: boolean}} power
 * @property {import('./transports/transport.js').Connect} connect
 * @property {import('./links.js').Ways} [ways]  how links past the relay can be opened
 * @property {import('./wire/sealing.js').SealPolicy} [seal]  whether and as whom frames through the relay are sealed
 * @property {() => number} [clock]  seconds, monotonic
 * @property {() => number} [random]
 * @property {() => void} [onChange]  something may have changed; ask `status()`
 *
 * @typedef {import('./host.js').HostOptions & OwnOptions} ClientOptions
 *
 * @typedef {object} Status
 * @property {import('./node.js').State} state
 * @property {string} reason  why it is closed, or why the last session ended
 * @property {number|null} retryInS
 * @property {string} relay
 * @property {string} path
 * @property {import('./wire/sealing.js').SealState} seal
 * @property {string} sealWhy  it is unsealed or refused
 * @property {string|null} backbone  fingerprint of its key
 * @property {string} kernel
 * @property {number} gbPerS
 * @property {'untested'|'passed'|'failed'} kernelTest
 * @property {number} calls
 * @property {number} rows
 * @property {number} failed
 * @property {number} tokens  rows of the layer that had most of them: each token passes each layer once
 * @property {boolean} paired  a backbone is there that may ask us
 * @property {number|null} sinceCallS  since the last call of this pairing was answered
 * @property {number} layers
 * @property {number} experts
 * @property {number} wanted
 * @property {number} loaded
 * @property {number} heldBytes
 * @property {number} pledgedBytes
 * @property {number|null} medianMs
 * @property {number|null} rttMs
 * @property {number} bytesIn
 * @property {number} bytesOut
 * @property {string} store
 * @property {number} keptBytes
 * @property {'' | 'full' | 'stuck'} storeTrouble
 * @property {string} lastFault  for developers
 * @property {string} lastFaultCode  for words
 */

/** One node. */
export class NodeClient {
  /** @param {ClientOptions} options */
  constructor(options) {
    this.options = options;
    this.clock = options.clock ?? (() => performance.now() / 1000);
    this.machine = new NodeMachine({ memoryBytes: options.memoryBytes }, options.random ?? Math.random);
    this.power = options.power;
    this.host = new ExpertHost(options, {
      clock: this.clock,
      random: this.machine.random,
      tell: (event) => {
        if (event.type === 'KernelTested') this.machine.config.threads = this.host.kernel?.width ?? 1;
        this.tell(event);
      },
      fault: (message, code) => this.fault(message, code),
      wants: (slice) => this.machine.wanted.has(slice),
      cancelled: (ticket) => this.machine.running.get(ticket)?.cancelled ?? true,
    });
    /** @type {Transport|null} */
    this.transport = null;
    /** @type {NodeSession|null} */
    this.session = null;
    /** Of the session. */
    this.sealing = new NodeSealing(options.seal ?? NO_SEAL);
    /** @type {SealedPassage|null} */
    this.passage = null;
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    this.timer = undefined;
    this.relay = '';
    this.path = '';
    this.links = new NodeLinks({
      ways: options.ways ?? {},
      clock: this.clock,
      onEvent: (link, event) => this.linkEvent(link, event),
      signal: (peer, epoch, signal) => this.signal(peer, epoch, signal),
      sha256: (data) => /** @type {import('./kernels/kernel.js').Kernel} */ (this.host.kernel).sha256(data),
    });
    /** Calls that came on a link: where their answer goes. @type {Map<string, import('./links.js').Link>} */
    this.callWays = new Map();
    this.lastClose = '';
    /** What the last Welcome gave us to come back with. @type {string|undefined} */
    this.resumeToken = undefined;
    this.refusing = false; // the backbone we are paired with: then others shall get our share
    this.lastFault = '';
    this.lastFaultCode = '';
    /** @type {Map<number, number>} rows answered, by layer */
    this.rowsOf = new Map();
    this.answeredAt = -Infinity; // the last call of this pairing
    this.bytesIn = 0; // of sessions that ended
    this.bytesOut = 0;
  }

  // --- what the owner may ask

  start() {
    this.tell({ type: 'Start' });
  }

  /** @param {boolean} paused */
  pause(paused) {
    this.tell({ type: paused ? 'PauseAsked' : 'ResumeAsked' });
  }

  /** @param {string} reason */
  leave(reason) {
    this.tell({ type: 'LeaveAsked', reason });
  }

  /** The page is about to be frozen. @param {string} reason */
  sleep(reason) {
    this.tell({ type: 'SleepAsked', reason });
  }

  /** The page runs again after it did not for a while. */
  wake() {
    this.tell({ type: 'Woke' });
  }

  /** The device's network may be another: is the session alive, or is it worth a try now? */
  checkAlive() {
    this.tell({ type: 'NetworkChanged' });
    this.session?.checkAlive(this.clock(), CHECK_S, this.transport?.movedBytes);
    this.flush();
  }

  /** @param {{battery: number|null, metered: boolean}} power */
  setPower(power) {
    this.power = power;
    this.carryOut(this.machine.offer());
    this.flush();
  }

  /** @returns {Status} */
  status() {
    const { machine, host, transport, options } = this;
    const ready = Object.values(machine.ready());
    return {
      state: machine.state,
      reason: machine.closedReason ?? this.lastClose,
      retryInS: machine.connectAt === null ? null : Math.max(0, machine.connectAt - this.clock()),
      relay: this.relay,
      path: this.path,
      seal: this.sealing.state,
      sealWhy: this.sealing.why,
      backbone: this.sealing.backbone,
      kernel: host.kernel?.build ?? '',
      gbPerS: machine.kernel?.gbPerS ?? 0,
      kernelTest: host.kernelTest,
      calls: machine.counters.calls,
      rows: machine.counters.rows,
      failed: machine.counters.failed,
      tokens: Math.max(0, ...this.rowsOf.values()),
      paired: machine.assignment !== null && machine.assignment.peer !== 0,
      sinceCallS: Number.isFinite(this.answeredAt) ? this.clock() - this.answeredAt : null,
      layers: ready.length,
      experts: ready.reduce((sum, experts) => sum + experts.length, 0),
      wanted: machine.wanted.size,
      loaded: [...machine.wanted.keys()].filter((slice) => machine.held.has(slice)).length,
      heldBytes: host.heldBytes,
      pledgedBytes: options.memoryBytes,
      medianMs: host.medianMs,
      rttMs: this.session?.rttMs ?? null,
      bytesIn: this.bytesIn + host.bytesIn + this.links.bytesReceived + (transport?.bytesReceived ?? 0),
      bytesOut: this.bytesOut + this.links.bytesSent + (transport?.bytesSent ?? 0),
      store: options.keeper.store.kind,
      keptBytes: options.keeper.keptBytes,
      storeTrouble: options.keeper.trouble,
      lastFault: this.lastFault,
      lastFaultCode: this.lastFaultCode,
    };
  }

  // --- the machine and its effects

  /** @param {NodeEvent} event */
  tell(event) {
    this.carryOut(this.machine.receive(event, this.clock()));
    this.flush();
    this.options.onChange?.();
  }

  /** @param {Effect[]} effects */
  carryOut(effects) {
    for (const effect of effects) {
      switch (effect.type) {
        case 'Compute': this.host.compute(effect.ticket, effect.call); break;
        case 'Reply': this.reply(effect.call, effect.result); break;
        case 'SendFailure': {
          const { peer, callId, epoch, code, message, phase, layer, expert } = effect;
          const failure = { code, message, phase, layer, expert };
          const link = this.wayBack(effect);
          if (link === null) this.live()?.sendFailure(peer, BigInt(callId), epoch, failure);
          else {
            link.session.sendFailure(BigInt(callId), epoch, failure);
            this.links.write(link);
          }
          break;
        }
        case 'FetchSlice': this.host.fetch(effect); break;
        case 'StopFetch': this.host.stopFetch(effect.slice); break;
        case 'FreeSlice': this.host.free(effect.slice); break;
        case 'TestKernel': this.host.testKernel(); break;
        case 'Connect': this.connect(effect.resume); break;
        case 'Disconnect': this.disconnect(effect.code, effect.reason); break;
        case 'SendOffer': this.offer(effect.inventory, effect.memoryBytes); break;
        case 'SendReady': {
          const { epoch, experts, refused, why } = effect;
          const any = Object.keys(refused).length > 0;
          this.live()?.sendSliceReady(epoch, experts, any ? refused : undefined, why.slice(0, 300));
          break;
        }
        case 'SendPause': this.live()?.sendPause(effect.paused); break;
        case 'SendBye': this.live()?.sendBye(effect.reason, effect.code); break;
      }
    }
  }

  /** The session, while it takes words. */
  live() {
    return this.session !== null && this.session.closed === null ? this.session : null;
  }

  /** @param {string[]} held @param {number} memoryBytes */
  offer(held, memoryBytes) {
    this.live()?.sendOffer({
      kernel: this.host.kernel?.build ?? '',
      memoryBytes: this.refusing ? 0 : memoryBytes,
      gbPerS: this.machine.kernel?.gbPerS ?? 0,
      battery: this.power.battery,
      metered: this.power.metered,
      name: this.options.name.slice(0, 40),
      inventory: [...new Set([...held, ...this.options.keeper.inventory()])].slice(0, MAX_INVENTORY).sort(),
      ...(this.links.lanes.length ? { lanes: this.links.lanes } : {}),
      ...this.sealing.offer,
    });
  }

  /** Write what the session has to say, then arm the next timer. */
  flush() {
    this.write();
    clearTimeout(this.timer);
    const times = [this.machine.nextTimer(), this.session?.nextTimer() ?? null, this.sealing.nextTimer()].filter((t) => t !== null);
    if (times.length) this.timer = setTimeout(() => this.onTimer(), Math.max(0, Math.min(...times) - this.clock()) * 1000);
  }

  write() {
    for (const data of this.session?.dataToSend() ?? []) this.passage?.outgoing(data);
  }

  onTimer() {
    const now = this.clock();
    this.session?.handleTimer(now, this.transport?.movedBytes);
    this.sessionEvents();
    const again = this.sealing.handleTimer(now);
    if (again !== null) this.sendSeal(this.sealing, again);
    this.carryOut(this.machine.handleTimer(now));
    this.flush();
    this.options.onChange?.();
  }

  // --- session

  /** @param {boolean} resume */
  connect(resume) {
    const session = new NodeSession(this.clock());
    const { identity, agent } = this.options;
    const sealing = new NodeSealing(this.options.seal ?? NO_SEAL);
    this.session = session;
    this.sealing = sealing;
    const heard = (/** @type {() => void} */ take) => {
      if (session !== this.session) return;
      take();
      this.sessionEvents();
      this.flush();
    };
    const passage = new SealedPassage(sealing.book, {
      send: (data) => transport.send(data),
      receive: (data) => heard(() => session.receiveData(data, this.clock())),
      refuse: (frame, fault) => {
        this.fault(fault.message, fault.code);
        heard(() => session.receiveFault(frame, fault, this.clock()));
      },
      stuck: (why) => heard(() => session.close(CloseCode.OVERLOADED, why)),
    });
    this.passage = passage;
    const transport = this.options.connect({
      onOpen: () => {
        if (session !== this.session) return;
        session.sendHello({ role: 'node', id: identity.id, secret: identity.secret, token: null, agent, resume, resumeToken: this.resumeToken });
        this.flush();
      },
      onMessage: (data) => passage.incoming(data),
      onClosed: (code, reason) => heard(() => session.receiveClose(code || ABNORMAL, reason)),
    });
    this.transport = transport;
    this.path = transport.path;
  }

  /** Translate what the session saw into what the machine understands. */
  sessionEvents() {
    for (const event of this.session?.events() ?? []) {
      switch (event.type) {
        case 'DispatchReceived':
          this.callWays.delete(wayKey(event)); // asked again through the relay: answer there
          this.path = this.transport?.path ?? this.path;
          this.tell({ type: 'DispatchReceived', call: callOf(event) });
          break;
        case 'ProbeReceived':
          this.live()?.sendEcho(event.peer, event.callId, event.epoch, event.answerBytes);
          this.write();
          break;
        case 'SignalReceived': if (this.host.kernel !== null) this.links.signalled(event); break;
        case 'CancelReceived':
          this.callWays.delete(wayKey(event)); // nobody waits for the answer
          this.tell({ type: 'CancelReceived', peer: event.peer, callId: event.callId });
          break;
        case 'CorruptReceived': {
          const message = event.error.message.slice(0, 500);
          const code = event.error instanceof SealFault ? 'bad_seal' : 'bad_frame';
          const failure = { code, message, phase: 'queue', layer: null, expert: null };
          this.live()?.sendFailure(event.peer, event.callId, event.epoch, failure);
          break;
        }
        case 'Welcome':
          this.relay = event.relay;
          this.resumeToken = event.resume;
          this.lastClose = '';
          this.tell({ type: 'Welcomed' });
          break;
        case 'Assign': this.assign(event); break;
        case 'SealReceived': this.agree(event); break;
        case 'Drain': this.tell({ type: 'DrainReceived', reconnectAfterS: event.reconnectAfterS }); break;
        case 'Closed':
          this.lastClose = inWords(event.code, event.reason);
          this.disconnect(event.code, event.reason);
          this.tell({ type: 'Closed', code: event.code, reason: event.reason });
          break;
        default: // a failure of a call we answered; nothing to do
      }
    }
  }

  /** @param {number} code @param {string} reason */
  disconnect(code, reason) {
    this.links.closeAll('the session with the relay ended');
    this.callWays.clear();
    this.write();
    const { transport } = this;
    if (transport !== null) {
      this.bytesIn += transport.bytesReceived;
      this.passage?.afterSending(() => {
        this.bytesOut += transport.bytesSent;
        transport.close(code, clipReason(reason));
      });
    }
    this.transport = null;
    this.passage = null;
    this.session = null;
    this.answeredAt = -Infinity;
    this.sealing = new NodeSealing(this.options.seal ?? NO_SEAL);
  }

  /** Take an assignment; with a pinned key only from that backbone. @param {import('./wire/messages.js').Assign} assign */
  assign(assign) {
    const { sealing, passage } = this;
    if (assign.peer === 0) {
      this.links.closeAll('the backbone left');
      this.callWays.clear();
      this.answeredAt = -Infinity;
      sealing.assigned(assign, this.clock(), () => undefined);
      this.tell({ type: 'Unpaired' });
      return;
    }
    const take = (/** @type {import('./wire/messages.js').Assign} */ taken) => {
      if (sealing === this.sealing) this.tell({ type: 'Assigned', assignment: this.assignmentOf(taken) });
    };
    const begin = () => {
      sealing.assigned(assign, this.clock(), (hello) => this.sendSeal(sealing, hello)).catch((error) => this.fault(messageOf(error), codeOf(error)));
    };
    if (!this.options.seal?.pinned) {
      begin();
      take(assign);
      return;
    }
    const looked = sealing.refusal(assign).then((why) => {
      if ((why !== null) !== this.refusing) {
        this.refusing = why !== null;
        this.carryOut(this.machine.offer());
      }
      if (why === null) {
        begin();
        take(assign);
        return;
      }
      sealing.refuse(why);
      take({ ...assign, peer: 0, layers: [] });
    });
    passage?.hold(looked.catch((error) => this.fault(messageOf(error), codeOf(error))));
  }

  /** @param {NodeSealing} sealing @param {import('./wire/messages.js').SealHello} hello */
  sendSeal(sealing, hello) {
    const state = this.session?.state;
    if (sealing !== this.sealing || (state !== 'ready' && state !== 'draining')) return;
    this.session?.sendSeal(sealing.peer, sealing.epoch, hello);
    this.write();
  }

  /** The backbone's half of the keys came: what follows may need them. @param {import('./wire/session.js').SealReceived} received */
  agree({ peer, epoch, message }) {
    const agreed = this.sealing.answered(peer, epoch, message).then(
      () => this.options.onChange?.(),
      (error) => this.fault(messageOf(error), codeOf(error)),
    );
    this.passage?.hold(agreed);
  }

  /** What this kernel needs of each layer; one that it cannot compute is named and refused. @param {import('./wire/messages.js').Assign} assign */
  assignmentOf(assign) {
    const layers = assign.layers.map((layer) => {
      const why = this.refusalOf(layer);
      if (why) this.fault(`layer ${layer.layer} is not served: ${why}`, 'not_served');
      return {
        layer: layer.layer,
        experts: layer.experts,
        sliceBytes: layer.sliceBytes,
        hiddenDim: layer.formula.hidden_dim,
        grids: layer.grid.x16 === null ? [0] : [0, 1],
        ...(why ? { refusal: why } : {}),
      };
    });
    const refused = new Set(layers.filter(({ refusal: why }) => why).map(({ layer }) => layer));
    this.host.assigned = new Map(assign.layers.filter(({ layer }) => !refused.has(layer)).map((layer) => [layer.layer, layer]));
    const tag = assign.model === null ? 0 : modelTag(assign.model);
    return { epoch: assign.epoch, peer: assign.peer, modelTag: tag, layers };
  }

  /** Why a layer cannot be computed here; a relay may say anything, and that ends no session. @param {import('./wire/messages.js').AssignLayer} layer */
  refusalOf({ formula, grid }) {
    try {
      const width = grid.x16 !== null && grid.x16.length !== formula.hidden_dim;
      if (width) return 'its grid does not have the width of its formula';
      return refusal(formula) ?? this.host.kernel?.refusal?.(formula) ?? '';
    } catch (error) {
      return messageOf(error) || 'its formula cannot be read';
    }
  }

  /** @param {string} message @param {string} code */
  fault(message, code) {
    this.lastFault = message;
    this.lastFaultCode = code;
  }

  /** @param {import('./node.js').Call} call @param {import('./wire/calls.js').Partial} partial */
  reply(call, partial) {
    this.answeredAt = this.clock();
    this.rowsOf.set(call.layer, (this.rowsOf.get(call.layer) ?? 0) + call.numTokens);
    const link = this.wayBack(call);
    if (link !== null) {
      link.session.sendPartial(BigInt(call.callId), call.epoch, partial);
      this.links.write(link);
      return;
    }
    this.live()?.sendPartial(call.peer, BigInt(call.callId), call.epoch, partial);
    this.write(); // at once: whoever waits, waits a layer of a token
  }

  // --- links past the relay

  /**
   * A call on a link is a call like any other; its answer goes back the same way.
   * @param {import('./links.js').Link} link
   * @param {import('./wire/session.js').CallEvent} event
   */
  linkEvent(link, event) {
    switch (event.type) {
      case 'DispatchReceived':
        this.callWays.set(wayKey(event), link);
        this.path = link.transport.path;
        this.tell({ type: 'DispatchReceived', call: callOf(event) });
        break;
      case 'CancelReceived':
          this.callWays.delete(wayKey(event)); // nobody waits for the answer
          this.tell({ type: 'CancelReceived', peer: event.peer, callId: event.callId });
          break;
      case 'ProbeReceived': link.session.sendEcho(event.callId, event.epoch, event.answerBytes); break;
      case 'CorruptReceived': {
        const message = event.error.message.slice(0, 500);
        const failure = { code: 'bad_frame', message, phase: 'queue', layer: null, expert: null };
        link.session.sendFailure(event.callId, event.epoch, failure);
        break;
      }
      default: // nothing to do
    }
  }

  /** @param {number} peer @param {number} epoch @param {Omit<import('./wire/messages.js').Signal, 'type'>} signal */
  signal(peer, epoch, signal) {
    const state = this.session?.state;
    if (state !== 'ready' && state !== 'draining') return;
    this.session?.sendSignal(peer, epoch, signal);
    this.write();
  }

  /** The link an answer goes to; null: the relay, also for calls whose link is gone. @param {{peer: number, callId: bigint|number|string}} call */
  wayBack(call) {
    const key = wayKey(call);
    const link = this.callWays.get(key);
    this.callWays.delete(key);
    return link?.session.ready ? link : null;
  }
}

/** @param {{peer: number, callId: bigint|number|string}} call */
function wayKey({ peer, callId }) {
  return `${peer}/${callId}`;
}

/** @param {DispatchReceived} received @returns {import('./node.js').Call} */
function callOf(received) {
  const { peer, callId, epoch, deadlineMs, dispatch } = received;
  const { modelTag: tag, layer, hiddenDim, grid, numTokens, experts } = dispatch;
  return { peer, callId, epoch, deadlineMs, modelTag: tag, layer, hiddenDim, grid, numTokens, experts, body: received };
}
