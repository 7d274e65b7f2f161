/**
 * Say what control frames carry: plain objects with a `type` (the Python class name) and camelCase fields.
 * Mirrors `relay/wire/messages.py` and `manifest.py`; calls are in calls.js. See PROTOCOL.md, "Messages".
 */

import { LocalProtocolError } from './errors.js';
import { Fields } from './fields.js';
import { FrameType } from './frames.js';

const ID_CHARS = 32;
const HASH_CHARS = 64;
const NAME_CHARS = 40;
const MAX_EXPERTS = 4096;
const MAX_LAYERS = 1024;
const MAX_HIDDEN_DIM = 0xffff;
const MAX_SLICE_BYTES = 2 ** 30;
/** Slices named in one Offer: a whole model of most families. Who holds more leaves the rest out. */
export const MAX_INVENTORY = 16_384;
const MAX_NODES = 100_000;
const MAX_SECONDS = 86_400;
const MAX_URL_CHARS = 300;
const MAX_WHY_CHARS = 300;
const MAX_LANES = 8;
const MAX_SIGNAL_VALUES = 8;
const MAX_SIGNAL_CHARS = 12_000; // a session description with some twenty candidates
const MAC_CHARS = 64;
const KEY_CHARS = 64; // a public key of 32 bytes
const SIGNATURE_CHARS = 128;
const U32 = 0xffffffff;
const EXPONENT_MIN = -1024;
const EXPONENT_MAX = 1023;

const ROLES = /** @type {const} */ (['node', 'backbone']);
const FAILURE_CODES = /** @type {const} */ ([
  'refused', 'not_held', 'stale_epoch', 'kernel_fault', 'non_finite', 'grid_overflow', 'overloaded', 'gone', 'bad_frame',
  'bad_seal',
]);
const FAILURE_PHASES = /** @type {const} */ (['queue', 'send', 'compute', 'return']);

/**
 * @typedef {Record<string, number[]>} Experts  layer -> experts
 *
 * A formula or grid is checked and then kept word for word, in the spelling of the wire.
 * @typedef {object} Formula
 * @property {number} hidden_dim
 * @property {number} expert_dim
 * @property {number|null} gate_type
 * @property {number} up_type
 * @property {number} down_type
 * @property {string} activation
 * @property {number} alpha
 * @property {number} limit
 * @property {'before'|'after'} weight_position
 * @property {boolean} biased
 * @property {boolean} [scaled] missing: false
 *
 * @typedef {{x32: number, x16: number[]|null}} LayerGrid
 * @typedef {{type: 'Hello', role: 'node'|'backbone', id: string, secret: string, token: string|null, agent: string,
 *   resume: boolean, resumeToken?: string}} Hello
 * @typedef {{type: 'Welcome', session: string, relay: string, pingIntervalS: number, maxFrameBytes: number,
 *   stun?: string, resume?: string, resumed?: boolean}} Welcome  resume: token for the next Hello
 * @typedef {{type: 'Offer', kernel: string, memoryBytes: number, gbPerS: number, battery: number|null,
 *   metered: boolean, name: string, inventory: string[], lanes?: string[], listen?: string, seal?: string}} Offer
 * @typedef {{layer: number, formula: Formula, grid: LayerGrid, slices: string[], sliceBytes: number}} ManifestLayer
 * @typedef {{model: string, name: string, numExperts: number, topK: number, layers: ManifestLayer[]}} Manifest
 * @typedef {{type: 'Register', name: string, manifest: Manifest, seal?: string, changes?: boolean}} Register
 * @typedef {{layer: number, formula: Formula, grid: LayerGrid, sliceBytes: number,
 *   experts: Record<string, string>}} AssignLayer  expert index -> slice id
 * @typedef {{type: 'Assign', epoch: number, peer: number, model: string|null, layers: AssignLayer[],
 *   seal?: string}} Assign  seal: identity of the backbone, if it seals
 * @typedef {{type: 'SliceReady', epoch: number, experts: Experts, refused?: Experts, why?: string}} SliceReady  refused: what it will
 *   not load before it offers itself anew, and why
 * @typedef {{peer: number, nodeId: string, name: string, kernel: string, gbPerS: number, epoch: number, path: string,
 *   experts: Experts, lanes?: string[], listen?: string, seal?: string, seen?: string}} PeerNode
 * @typedef {{type: 'Peers', nodes: PeerNode[], change?: boolean, gone?: number[]}} Peers
 * @typedef {{type: 'SliceWanted', slice: string}} SliceWanted
 * @typedef {{type: 'Ping', t: number}} Ping
 * @typedef {{type: 'Pong', t: number}} Pong
 * @typedef {{type: 'Pause', paused: boolean}} Pause
 * @typedef {{type: 'Drain', reason: string, reconnectAfterS: number}} Drain
 * @typedef {{type: 'Bye', code: number, reason: string}} Bye
 * @typedef {{type: 'Failure', code: string, message: string, phase: string, layer: number|null,
 *   expert: number|null}} Failure
 * @typedef {{type: 'Signal', kind: string, link: string, data: Record<string, string>}} Signal
 * @typedef {{type: 'SealHello', identity: string, ephemeral: string, signature: string}} SealHello
 * @typedef {{type: 'SealAnswer', identity: string, ephemeral: string, signature: string}} SealAnswer
 * @typedef {{type: 'LinkHello', link: string, nonce: string}} LinkHello
 * @typedef {{type: 'LinkProof', nonce: string, mac: string}} LinkProof
 * @typedef {{peer: number, lane: string, why: string, ageS: number, p50Ms: number|null, p95Ms: number|null}} PathState
 * @typedef {{type: 'PathReport', paths: PathState[]}} PathReport
 * @typedef {Hello|Welcome|Offer|Register|Assign|SliceReady|Peers|SliceWanted|Ping|Pong|Pause|Drain|Bye
 *   |Signal|SealHello|SealAnswer|LinkHello|LinkProof|PathReport} ControlMessage
 */

/** Frame type of each message. @type {Record<(ControlMessage|Failure)['type'], number>} */
export const MESSAGE_TYPES = {
  Hello: FrameType.HELLO,
  Welcome: FrameType.WELCOME,
  Offer: FrameType.OFFER,
  Register: FrameType.REGISTER,
  Assign: FrameType.ASSIGN,
  SliceReady: FrameType.SLICE_READY,
  Peers: FrameType.PEERS,
  SliceWanted: FrameType.SLICE_WANTED,
  Failure: FrameType.FAILURE,
  Ping: FrameType.PING,
  Pong: FrameType.PONG,
  Pause: FrameType.PAUSE,
  Signal: FrameType.SIGNAL,
  SealHello: FrameType.SEAL_HELLO,
  SealAnswer: FrameType.SEAL_ANSWER,
  LinkHello: FrameType.LINK_HELLO,
  LinkProof: FrameType.LINK_PROOF,
  PathReport: FrameType.PATH_REPORT,
  Drain: FrameType.DRAIN,
  Bye: FrameType.BYE,
};

/**
 * Write the payload of one message.
 * @param {ControlMessage|Failure} message
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function toPayload(message) {
  return new TextEncoder().encode(JSON.stringify(toJson(message), refuseNonFinite));
}

/**
 * Read the payload of a message of this frame type; throws RemoteProtocolError naming frame and key.
 * @param {number} type
 * @param {Uint8Array} payload
 * @returns {ControlMessage|Failure}
 */
export function fromPayload(type, payload) {
  const reader = READERS.get(type);
  if (reader === undefined) throw new LocalProtocolError(`frames of type ${type} carry no message`);
  return reader.read(Fields.parse(reader.name, payload));
}

/**
 * @param {ControlMessage|Failure} m
 * @returns {object}
 */
function toJson(m) {
  switch (m.type) {
    case 'Hello':
      return {
        role: m.role,
        id: m.id,
        secret: m.secret,
        token: m.token,
        agent: m.agent,
        resume: m.resume,
        ...given({ resume_token: m.resumeToken }),
      };
    case 'Welcome':
      return {
        session: m.session,
        relay: m.relay,
        ping_interval_s: m.pingIntervalS,
        max_frame_bytes: m.maxFrameBytes,
        ...given({ stun: m.stun, resume: m.resume, resumed: m.resumed }),
      };
    case 'Offer':
      return {
        kernel: m.kernel,
        memory_bytes: m.memoryBytes,
        gb_per_s: m.gbPerS,
        battery: m.battery,
        metered: m.metered,
        name: m.name,
        inventory: m.inventory,
        ...given({ lanes: m.lanes, listen: m.listen, seal: m.seal }),
      };
    case 'Register':
      return {
        name: m.name,
        manifest: {
          model: m.manifest.model,
          name: m.manifest.name,
          num_experts: m.manifest.numExperts,
          top_k: m.manifest.topK,
          layers: m.manifest.layers.map(({ layer, formula, grid, slices, sliceBytes }) => ({
            layer,
            formula,
            grid,
            slices,
            slice_bytes: sliceBytes,
          })),
        },
        ...given({ seal: m.seal, changes: m.changes }),
      };
    case 'Assign':
      return {
        epoch: m.epoch,
        peer: m.peer,
        model: m.model,
        layers: m.layers.map(({ layer, formula, grid, sliceBytes, experts }) => ({
          layer,
          formula,
          grid,
          slice_bytes: sliceBytes,
          experts,
        })),
        ...given({ seal: m.seal }),
      };
    case 'SliceReady':
      return { epoch: m.epoch, experts: m.experts, ...given({ refused: m.refused, why: m.why }) };
    case 'Peers':
      return {
        nodes: m.nodes.map(({ peer, nodeId, name, kernel, gbPerS, epoch, path, experts, ...ways }) => ({
          peer,
          node_id: nodeId,
          name,
          kernel,
          gb_per_s: gbPerS,
          epoch,
          path,
          experts,
          ...given({ lanes: ways.lanes, listen: ways.listen, seal: ways.seal, seen: ways.seen }),
        })),
        ...given({ change: m.change, gone: m.gone }),
      };
    case 'SliceWanted':
      return { slice: m.slice };
    case 'Failure':
      return { code: m.code, message: m.message, phase: m.phase, layer: m.layer, expert: m.expert };
    case 'Ping':
    case 'Pong':
      return { t: m.t };
    case 'Pause':
      return { paused: m.paused };
    case 'Drain':
      return { reason: m.reason, reconnect_after_s: m.reconnectAfterS };
    case 'Bye':
      return { code: m.code, reason: m.reason };
    case 'Signal':
      return { kind: m.kind, link: m.link, data: m.data };
    case 'SealHello':
    case 'SealAnswer':
      return { identity: m.identity, ephemeral: m.ephemeral, signature: m.signature };
    case 'LinkHello':
      return { link: m.link, nonce: m.nonce };
    case 'LinkProof':
      return { nonce: m.nonce, mac: m.mac };
    case 'PathReport':
      return {
        paths: m.paths.map(({ peer, lane, why, ageS, p50Ms, p95Ms }) => ({
          peer,
          lane,
          why,
          age_s: ageS,
          p50_ms: p50Ms,
          p95_ms: p95Ms,
        })),
      };
  }
}

/** @type {Map<number, {name: string, read: (fields: Fields) => ControlMessage|Failure}>} */
const READERS = new Map([
  reader('Hello', (f) => ({
    type: 'Hello',
    role: f.oneOf('role', ROLES),
    id: f.hex('id', ID_CHARS),
    secret: f.hex('secret', ID_CHARS),
    token: f.raw('token') === null ? null : f.text('token', 200),
    agent: f.text('agent', 200),
    resume: f.boolean('resume'),
    ...given({ resumeToken: f.has('resume_token') ? f.hex('resume_token', ID_CHARS) : undefined }),
  })),
  reader('Welcome', (f) => ({
    type: 'Welcome',
    session: f.hex('session', ID_CHARS),
    relay: f.text('relay', 200),
    pingIntervalS: f.number('ping_interval_s', 0.01, MAX_SECONDS),
    maxFrameBytes: f.integer('max_frame_bytes', 1, U32),
    ...given({
      stun: f.has('stun') ? f.text('stun', MAX_URL_CHARS) : undefined,
      resume: f.has('resume') ? f.hex('resume', ID_CHARS) : undefined,
      resumed: f.has('resumed') && f.boolean('resumed'),
    }),
  })),
  reader('Offer', (f) => ({
    type: 'Offer',
    kernel: f.text('kernel', NAME_CHARS),
    memoryBytes: f.integer('memory_bytes', 0, Number.MAX_SAFE_INTEGER),
    gbPerS: f.number('gb_per_s', 0, 1e6),
    battery: f.raw('battery') === null ? null : f.number('battery', 0, 1),
    metered: f.boolean('metered'),
    name: f.text('name', NAME_CHARS),
    inventory: f.hexes('inventory', HASH_CHARS, MAX_INVENTORY),
    ...readWays(f),
  })),
  reader('Register', (f) => ({
    type: 'Register',
    name: f.text('name', NAME_CHARS),
    manifest: readManifest(f.object('manifest')),
    ...readSeal(f),
    ...given({ changes: f.has('changes') && f.boolean('changes') }),
  })),
  reader('Assign', (f) => {
    const layers = f.objects('layers', MAX_LAYERS).map(readAssignLayer);
    if (new Set(layers.map((layer) => layer.layer)).size !== layers.length) {
      f.fail('layers', 'an array that names each layer once');
    }
    return {
      type: 'Assign',
      epoch: f.integer('epoch', 0, U32),
      peer: f.integer('peer', 0, U32),
      model: f.raw('model') === null ? null : f.hex('model', HASH_CHARS),
      layers,
      ...readSeal(f),
    };
  }),
  reader('SliceReady', (f) => ({
    type: 'SliceReady',
    epoch: f.integer('epoch', 0, U32),
    experts: readExperts(f),
    ...given({
      refused: f.has('refused') ? readExperts(f, 'refused') : undefined,
      why: f.has('why') ? f.text('why', MAX_WHY_CHARS) : undefined,
    }),
  })),
  reader('Peers', (f) => ({
    type: 'Peers',
    nodes: f.objects('nodes', MAX_NODES).map((n) => ({
      peer: n.integer('peer', 1, U32),
      nodeId: n.hex('node_id', ID_CHARS),
      name: n.text('name', NAME_CHARS),
      kernel: n.text('kernel', NAME_CHARS),
      gbPerS: n.number('gb_per_s', 0, 1e6),
      epoch: n.integer('epoch', 0, U32),
      path: n.text('path', NAME_CHARS),
      experts: readExperts(n),
      ...readWays(n),
      ...readSeen(n),
    })),
    ...given({
      change: f.has('change') && f.boolean('change'),
      gone: f.has('gone') ? f.integers('gone', 1, U32, MAX_NODES) : undefined,
    }),
  })),
  reader('Signal', (f) => {
    const data = f.object('data');
    const keys = Object.keys(data.json);
    if (keys.length > MAX_SIGNAL_VALUES) f.fail('data', `an object of at most ${MAX_SIGNAL_VALUES} keys`);
    return {
      type: 'Signal',
      kind: f.text('kind', NAME_CHARS),
      link: f.hex('link', ID_CHARS),
      data: Object.fromEntries(keys.map((key) => [key, data.text(key, MAX_SIGNAL_CHARS)])),
    };
  }),
  reader('SealHello', (f) => ({ type: 'SealHello', ...readSealKeys(f) })),
  reader('SealAnswer', (f) => ({ type: 'SealAnswer', ...readSealKeys(f) })),
  reader('LinkHello', (f) => ({
    type: 'LinkHello',
    link: f.hex('link', ID_CHARS),
    nonce: f.hex('nonce', ID_CHARS),
  })),
  reader('LinkProof', (f) => ({ type: 'LinkProof', nonce: f.hex('nonce', ID_CHARS), mac: f.hex('mac', MAC_CHARS) })),
  reader('PathReport', (f) => ({
    type: 'PathReport',
    paths: f.objects('paths', MAX_NODES).map((p) => ({
      peer: p.integer('peer', 1, U32),
      lane: p.text('lane', NAME_CHARS),
      why: p.text('why', 200),
      ageS: p.number('age_s', 0, 1e9),
      p50Ms: p.raw('p50_ms') === null ? null : p.number('p50_ms', 0, 1e9),
      p95Ms: p.raw('p95_ms') === null ? null : p.number('p95_ms', 0, 1e9),
    })),
  })),
  reader('SliceWanted', (f) => ({ type: 'SliceWanted', slice: f.hex('slice', HASH_CHARS) })),
  reader('Failure', (f) => ({
    type: 'Failure',
    code: f.oneOf('code', FAILURE_CODES),
    message: f.text('message', 500),
    phase: f.oneOf('phase', FAILURE_PHASES),
    layer: f.has('layer') ? f.integer('layer', 0, 0xffff) : null,
    expert: f.has('expert') ? f.integer('expert', 0, MAX_EXPERTS) : null,
  })),
  reader('Ping', (f) => ({ type: 'Ping', t: f.number('t', 0, Number.MAX_SAFE_INTEGER) })),
  reader('Pong', (f) => ({ type: 'Pong', t: f.number('t', 0, Number.MAX_SAFE_INTEGER) })),
  reader('Pause', (f) => ({ type: 'Pause', paused: f.boolean('paused') })),
  reader('Drain', (f) => ({
    type: 'Drain',
    reason: f.text('reason', 500),
    reconnectAfterS: f.number('reconnect_after_s', 0, MAX_SECONDS),
  })),
  reader('Bye', (f) => ({ type: 'Bye', code: f.integer('code', 1000, 4999), reason: f.text('reason', 500) })),
]);

/**
 * @param {(ControlMessage|Failure)['type']} name
 * @param {(fields: Fields) => ControlMessage|Failure} read
 * @returns {[number, {name: string, read: (fields: Fields) => ControlMessage|Failure}]}
 */
function reader(name, read) {
  return [MESSAGE_TYPES[name], { name, read }];
}

/**
 * Keep what says something: a key that came later is left out where it has nothing to say.
 * @template {Record<string, unknown>} T
 * @param {T} optional
 * @returns {Partial<T>}
 */
function given(optional) {
  const some = Object.entries(optional).filter(([, value]) => (Array.isArray(value) ? value.length > 0 : Boolean(value)));
  return /** @type {Partial<T>} */ (Object.fromEntries(some));
}

/**
 * The ways a node can be reached besides the relayed one, and its identity.
 * @param {Fields} f
 * @returns {{lanes?: string[], listen?: string, seal?: string}}
 */
function readWays(f) {
  const lanes = f.has('lanes') ? f.array('lanes', MAX_LANES) : [];
  if (!lanes.every((lane) => typeof lane === 'string' && lane.length <= NAME_CHARS && /^[\0-\x7f]*$/.test(lane))) {
    f.fail('lanes', `an array of ASCII strings of at most ${NAME_CHARS} characters`);
  }
  return { ...given({ lanes, listen: f.has('listen') ? f.text('listen', MAX_URL_CHARS) : undefined }), ...readSeal(f) };
}

/** @param {Fields} f @returns {{seen?: string}} */
function readSeen(f) {
  if (!f.has('seen')) return {};
  const seen = f.text('seen', 45);
  if (!/^[0-9a-fA-F:.]{2,}$/.test(seen)) f.fail('seen', 'an IP address');
  return { seen };
}

/** @param {Fields} f @returns {{seal?: string}} */
function readSeal(f) {
  return f.has('seal') ? { seal: f.hex('seal', KEY_CHARS) } : {};
}

/** @param {Fields} f */
function readSealKeys(f) {
  return {
    identity: f.hex('identity', KEY_CHARS),
    ephemeral: f.hex('ephemeral', KEY_CHARS),
    signature: f.hex('signature', SIGNATURE_CHARS),
  };
}

/**
 * @param {Fields} f
 * @returns {Manifest}
 */
function readManifest(f) {
  const numExperts = f.integer('num_experts', 1, MAX_EXPERTS);
  const layers = f.objects('layers', MAX_LAYERS).map((entry) => {
    const slices = entry.hexes('slices', HASH_CHARS, numExperts);
    if (slices.length !== numExperts) entry.fail('slices', `one slice for each of ${numExperts} experts`);
    const formula = readFormula(entry.object('formula'));
    return {
      layer: entry.integer('layer', 0, 0xffff),
      formula,
      grid: readGrid(entry.object('grid'), formula.hidden_dim),
      slices,
      sliceBytes: entry.integer('slice_bytes', 1, MAX_SLICE_BYTES),
    };
  });
  if (layers.length === 0 || layers.some((layer, i) => i > 0 && layer.layer <= layers[i - 1].layer)) {
    f.fail('layers', 'a non-empty array of layers in rising order');
  }
  return {
    model: f.hex('model', HASH_CHARS),
    name: f.text('name', 200),
    numExperts,
    topK: f.integer('top_k', 1, numExperts),
    layers,
  };
}

/**
 * @param {Fields} f
 * @returns {AssignLayer}
 */
function readAssignLayer(f) {
  const formula = readFormula(f.object('formula'));
  const held = f.object('experts');
  /** @type {Record<string, string>} */
  const experts = {};
  for (const key of held.indices()) experts[key] = held.hex(key, HASH_CHARS);
  return {
    layer: f.integer('layer', 0, 0xffff),
    formula,
    grid: readGrid(f.object('grid'), formula.hidden_dim),
    sliceBytes: f.integer('slice_bytes', 1, MAX_SLICE_BYTES),
    experts,
  };
}

/**
 * Check the keys every formula has. Which of them a kernel can compute, the kernel says.
 * @param {Fields} f
 * @returns {Formula}
 */
function readFormula(f) {
  f.integer('hidden_dim', 1, MAX_HIDDEN_DIM);
  f.integer('expert_dim', 1, 2 ** 20);
  if (f.raw('gate_type') !== null) f.integer('gate_type', 0, 255);
  f.integer('up_type', 0, 255);
  f.integer('down_type', 0, 255);
  f.text('activation', 40);
  f.number('alpha', -1e30, 1e30);
  f.number('limit', -1e30, 1e30);
  f.oneOf('weight_position', ['before', 'after']);
  f.boolean('biased');
  return /** @type {any} */ (f.json);
}

/**
 * Check the layer exponents: `x32` one for all channels, `x16` one per channel or null.
 * @param {Fields} f
 * @param {number} hiddenDim
 * @returns {LayerGrid}
 */
function readGrid(f, hiddenDim) {
  f.integer('x32', EXPONENT_MIN, EXPONENT_MAX);
  if (f.raw('x16') !== null && f.integers('x16', EXPONENT_MIN, EXPONENT_MAX, hiddenDim).length !== hiddenDim) {
    f.fail('x16', `one exponent for each of ${hiddenDim} channels`);
  }
  return /** @type {any} */ (f.json);
}

/**
 * @param {Fields} f
 * @param {string} [key]
 * @returns {Experts}
 */
function readExperts(f, key = 'experts') {
  const layers = f.object(key);
  /** @type {Experts} */
  const experts = {};
  for (const index of layers.indices()) experts[index] = layers.integers(index, 0, MAX_EXPERTS, MAX_EXPERTS);
  return experts;
}

/**
 * JSON.stringify would turn NaN into null without a word.
 * @param {string} key
 * @param {unknown} value
 */
function refuseNonFinite(key, value) {
  if (typeof value === 'number' && !Number.isFinite(value)) throw new LocalProtocolError(`${key} is not finite`);
  return value;
}
