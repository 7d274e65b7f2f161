/**
 * Decide which slices a node fetches, holds and gives up: pure, a part of `node.js`, mirrors `backbone/node/holdings.py`.
 *
 * The table of failures, and what follows from each, stands there.
 */

export const RETRY_BASE_S = 0.5;
export const RETRY_CAP_S = 30;
const BYTES_TRIES = 2;

/**
 * @typedef {import('./node.js').AssignedLayer} AssignedLayer
 * @typedef {import('./node.js').Effect} Effect
 * @typedef {import('./node.js').FetchSlice} FetchSlice
 * @typedef {'network'|'kernel'|'bytes'|'slice'|'formula'|'memory'} FailureKind
 * @typedef {{failures: number, wrong: number, at: number}} Retry  failures in a row, those by wrong bytes, not before
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

/** The slices of one node. */
export class Holdings {
  /** @param {number} memoryBytes @param {number} parallelFetches @param {() => number} random */
  constructor(memoryBytes, parallelFetches, random) {
    this.memoryBytes = memoryBytes;
    this.mostParallel = parallelFetches;
    this.random = random;
    /** @type {Set<string>} */
    this.held = new Set();
    /** @type {Set<string>} */
    this.fetching = new Set();
    /** @type {Map<string, FetchSlice>} in the order of fetching */
    this.wanted = new Map();
    this.skipped = 0; // assigned slices for which there is no room
    /** @type {Map<number, AssignedLayer>} */
    this.layers = new Map();
    /** @type {Map<number, AssignedLayer>} */
    this.refusedLayers = new Map();
    /** @type {Map<string, Retry>} */
    this.retries = new Map();
    this.modelTag = 0;
    /** What may be offered, in bytes of slices. */
    this.pledgeBytes = 0;
    this.roomBytes = 0;
    /** @type {Map<number, number>} bytes of a slice -> bytes of memory it takes */
    this.costs = new Map();
    /** @type {Map<string, {kind: FailureKind, why: string}>} */
    this.givenUp = new Map();
    this.parallel = 0;
    this.beginAnew();
    Object.seal(this); // a misspelt field fails
  }

  /** Another kernel, or another start: what did not fit or could not be computed may do so now. */
  beginAnew() {
    this.pledgeBytes = this.roomBytes = this.memoryBytes;
    this.costs.clear();
    this.givenUp.clear();
    this.parallel = this.mostParallel;
  }

  /** Bytes that were wrong may be right now. */
  sessionBegan() {
    for (const [slice, { kind }] of [...this.givenUp]) if (kind === 'bytes') this.givenUp.delete(slice);
  }

  /** Layer -> experts that can be called now. @returns {Record<string, number[]>} */
  ready() {
    return experts(this.layers.values(), (slice) => this.held.has(slice) && this.wanted.has(slice));
  }

  /** Layer -> assigned experts that will not be loaded. @returns {Record<string, number[]>} */
  refused() {
    return { ...experts(this.layers.values(), (slice) => this.givenUp.has(slice)), ...experts(this.refusedLayers.values(), () => true) };
  }

  /** Why the first of them is not. */
  why() {
    for (const layer of this.refusedLayers.values()) return layer.refusal ?? '';
    for (const [slice, { why }] of this.givenUp) if (this.isAssigned(slice)) return why;
    return '';
  }

  /** When `fetchMore` may have something to do by itself. @returns {number|null} */
  nextTimer() {
    if (this.fetching.size >= this.parallel) return null;
    const waiting = [...this.retries].filter(([slice]) => this.wanted.has(slice) && !this.fetching.has(slice)).map(([, { at }]) => at);
    return waiting.length ? Math.min(...waiting) : null;
  }

  /** Take the complete set; stop and free what is not in it. @param {AssignedLayer[]} layers @param {number} modelTag @returns {Effect[]} */
  assign(layers, modelTag) {
    this.layers = new Map(layers.filter((layer) => !layer.refusal).map((layer) => [layer.layer, layer]));
    this.refusedLayers = new Map(layers.filter((layer) => layer.refusal).map((layer) => [layer.layer, layer]));
    for (const { sliceBytes, heldBytes = 0 } of this.layers.values()) {
      if (heldBytes > this.cost(sliceBytes)) this.costs.set(sliceBytes, heldBytes);
    }
    if (modelTag && modelTag !== this.modelTag) {
      this.modelTag = modelTag;
      this.pledgeBytes = this.roomBytes;
    }
    return this.choose();
  }

  /** Whether a layer with this slice is held as far as it will be. @param {string} slice */
  complete(slice) {
    return [...this.layers.values()].map((layer) => Object.values(layer.experts))
      .some((ids) => ids.includes(slice) && ids.every((s) => this.held.has(s) || !this.wanted.has(s)));
  }

  /** Begin as many fetches as may run side by side. @param {number} now @returns {Effect[]} */
  fetchMore(now) {
    /** @type {Effect[]} */
    const effects = [];
    for (const [slice, fetch] of this.wanted) {
      if (this.fetching.size >= this.parallel) break;
      const due = (this.retries.get(slice)?.at ?? now) <= now;
      if (!this.held.has(slice) && !this.fetching.has(slice) && due) {
        this.fetching.add(slice);
        effects.push(fetch);
      }
    }
    return effects;
  }

  /** A slice that was being fetched is held, and takes so much memory (0: as its bytes). @param {string} slice @param {number} heldBytes @returns {Effect[]} */
  loaded(slice, heldBytes) {
    this.fetching.delete(slice);
    this.retries.delete(slice);
    this.parallel = Math.min(this.mostParallel, this.parallel + 1);
    this.held.add(slice);
    const { sizeBytes } = /** @type {FetchSlice} */ (this.wanted.get(slice));
    if (heldBytes <= this.cost(sizeBytes)) return [];
    this.costs.set(sizeBytes, heldBytes);
    return this.choose();
  }

  /**
   * A slice that was being fetched could not be had; the table says what follows.
   * @param {{slice: string, reason: string, kind?: FailureKind, progress?: boolean}} event
   * @param {number} now
   * @returns {Effect[]}
   */
  failed({ slice, reason, kind = 'network', progress = false }, now) {
    this.fetching.delete(slice);
    const retry = this.retries.get(slice) ?? { failures: 0, wrong: 0, at: 0 };
    this.retries.set(slice, retry);
    if (kind === 'memory') {
      this.roomBytes = this.usedBytes();
      return this.choose();
    }
    if (kind === 'bytes') retry.wrong += 1;
    if (kind === 'slice' || kind === 'formula' || retry.wrong >= BYTES_TRIES) {
      const layer = this.layers.get(/** @type {FetchSlice} */ (this.wanted.get(slice)).layer);
      for (const s of kind === 'formula' && layer !== undefined ? Object.values(layer.experts) : [slice]) {
        if (!this.held.has(s)) this.givenUp.set(s, { kind, why: reason });
      }
      return this.choose();
    }
    if (kind === 'network') this.parallel = Math.max(1, this.parallel >> 1);
    if (progress) retry.failures = 0;
    retry.at = now + backoffS(retry.failures, this.random());
    retry.failures += 1;
    return [];
  }

  /** Fetch nothing for now. @returns {Effect[]} */
  stop() {
    /** @type {Effect[]} */
    const effects = [...this.fetching].sort().map((slice) => ({ type: 'StopFetch', slice }));
    this.fetching.clear();
    return effects;
  }

  /** The kernel no longer holds these. @param {string[]} slices */
  lost(slices) {
    for (const slice of slices) this.held.delete(slice);
  }

  /** Let go of everything. @returns {Effect[]} */
  clear() {
    const effects = this.stop();
    for (const slice of [...this.held].sort()) effects.push({ type: 'FreeSlice', slice });
    this.held.clear();
    this.retries.clear();
    this.wanted.clear();
    this.layers.clear();
    this.refusedLayers.clear();
    return effects;
  }

  /** Choose what there is room for, what is held first; each slice is counted once. @returns {Effect[]} */
  choose() {
    /** @type {Map<string, FetchSlice>} */
    const found = new Map();
    for (const layer of this.layers.values()) {
      for (const [, slice] of expertsOf(layer)) {
        if (found.has(slice) || this.givenUp.has(slice)) continue;
        found.set(slice, { type: 'FetchSlice', slice, layer: layer.layer, sizeBytes: layer.sliceBytes });
      }
    }
    let used = 0;
    /** @type {Set<string>} */
    const chosen = new Set();
    const order = [...found.values()];
    for (const { slice, sizeBytes } of [...order.filter((f) => this.held.has(f.slice)), ...order.filter((f) => !this.held.has(f.slice))]) {
      if (used + this.cost(sizeBytes) > this.roomBytes) continue;
      used += this.cost(sizeBytes);
      chosen.add(slice);
    }
    this.wanted = new Map([...found].filter(([slice]) => chosen.has(slice)));
    this.skipped = found.size - chosen.size;
    if (this.skipped) {
      const fits = [...this.wanted.values()].reduce((sum, { sizeBytes }) => sum + sizeBytes, 0);
      this.pledgeBytes = Math.min(this.pledgeBytes, fits);
    }
    for (const slice of [...this.retries.keys()]) if (!this.wanted.has(slice)) this.retries.delete(slice);
    /** @type {Effect[]} */
    const effects = [];
    for (const slice of [...this.fetching].filter((s) => !this.wanted.has(s)).sort()) {
      this.fetching.delete(slice);
      effects.push({ type: 'StopFetch', slice });
    }
    for (const slice of [...this.held].filter((s) => !this.wanted.has(s)).sort()) {
      this.held.delete(slice);
      effects.push({ type: 'FreeSlice', slice });
    }
    return effects;
  }

  /** @param {number} sizeBytes */
  cost(sizeBytes) {
    return this.costs.get(sizeBytes) ?? sizeBytes;
  }

  usedBytes() {
    return [...this.held].reduce((sum, slice) => sum + this.cost(this.wanted.get(slice)?.sizeBytes ?? 0), 0);
  }

  /** @param {string} slice */
  isAssigned(slice) {
    return [...this.layers.values()].some((layer) => Object.values(layer.experts).includes(slice));
  }
}

/** Experts in the order of their numbers. @param {AssignedLayer} layer @returns {[number, string][]} */
function expertsOf(layer) {
  return Object.entries(layer.experts).map(([e, s]) => /** @type {[number, string]} */ ([Number(e), s]))
    .sort(([a], [b]) => a - b);
}

/** @param {Iterable<AssignedLayer>} layers @param {(slice: string) => boolean} condition @returns {Record<string, number[]>} */
function experts(layers, condition) {
  /** @type {Record<string, number[]>} */
  const found = {};
  for (const layer of layers) {
    const those = expertsOf(layer).filter(([, slice]) => condition(slice)).map(([e]) => e);
    if (those.length) found[layer.layer] = those;
  }
  return found;
}
