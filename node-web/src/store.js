/**
 * Keep slices on the device between visits: in the origin private file system, else the Cache API, else not at all.
 *
 * A store promises nothing: browsers evict, quotas change, a write may stop half-way. So whoever reads checks the
 * bytes against their name again (`host.js`), and every method answers instead of throwing.
 */

const FOLDER = 'slices';
const CACHE = 'slices-v1';
const PROBE = 'probe';
const SLICE_NAME = /^[0-9a-f]{64}(\.part)?$/; // part: the first bytes of a download that broke off
const isPart = /** @param {string} name */ (name) => name.endsWith('.part');
const LIMIT_MS = 3000; // what takes longer never ends: Chromium's createSyncAccessHandle does that now and then
const MOST_STUCK = 3; // then storage is left alone for this visit
const PENDING_BYTES = 32_000_000; // slices that wait to be written

/**
 * @typedef {object} SliceStore
 * @property {'opfs' | 'cache' | 'memory'} kind  memory: nothing outlives the page
 * @property {() => Promise<Map<string, number>>} list  slice id -> bytes
 * @property {(slice: string) => Promise<Uint8Array | null>} read
 * @property {(slice: string, data: Uint8Array) => Promise<'kept' | 'full' | 'refused'>} write  refused: not now, not here
 * @property {(slice: string) => Promise<void>} remove
 */

/** Open the best store that really works here: each is tried with a few bytes. @returns {Promise<SliceStore>} */
export async function openStore() {
  for (const open of [openOpfs, openCache]) {
    const store = await within(LIMIT_MS, probed(open), () => null);
    if (store !== null) return store;
  }
  return new NoStore();
}

/** Every store in which something may be kept, without a write: another worker may be at work. @returns {Promise<SliceStore[]>} */
export async function openStores() {
  const opened = [openOpfs, openCache].map((open) => within(LIMIT_MS, open().catch(() => null), () => null));
  return (await Promise.all(opened)).filter((store) => store !== null);
}

/** A store that gave back what it was given. @param {() => Promise<SliceStore>} open @returns {Promise<SliceStore | null>} */
async function probed(open) {
  try {
    const store = await open();
    const outcome = await store.write(PROBE, Uint8Array.of(1, 2, 3));
    const back = await store.read(PROBE);
    await store.remove(PROBE);
    return outcome === 'kept' && back?.length === 3 && back[2] === 3 ? store : null;
  } catch {
    return null; // no secure context, private browsing, or storage is blocked
  }
}

/**
 * An answer, or another one when it does not come in time.
 * @template T
 * @param {number} limitMs
 * @param {Promise<T>} answer
 * @param {() => T} otherwise
 * @returns {Promise<T>}
 */
async function within(limitMs, answer, otherwise) {
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  /** @type {Promise<T>} */
  const late = new Promise((resolve) => {
    timer = setTimeout(() => resolve(otherwise()), limitMs);
  });
  return Promise.race([answer, late]).finally(() => clearTimeout(timer));
}

/** Nothing is kept. @implements {SliceStore} */
export class NoStore {
  /** @readonly */
  kind = /** @type {const} */ ('memory');
  async list() {
    return /** @type {Map<string, number>} */ (new Map());
  }
  async read() {
    return null;
  }
  async write() {
    return /** @type {const} */ ('refused');
  }
  async remove() {}
}

/** @returns {Promise<SliceStore>} */
async function openOpfs() {
  const root = await navigator.storage.getDirectory();
  return new OpfsStore(await root.getDirectoryHandle(FOLDER, { create: true }));
}

/** One file per slice. Sync access handles exist in workers only, and in every browser that has OPFS. @implements {SliceStore} */
export class OpfsStore {
  /** @readonly */
  kind = /** @type {const} */ ('opfs');

  /** @param {any} folder a FileSystemDirectoryHandle */
  constructor(folder) {
    this.folder = folder;
  }

  async list() {
    /** @type {Map<string, number>} */
    const slices = new Map();
    try {
      for await (const [name, handle] of this.folder.entries()) {
        if (SLICE_NAME.test(name)) slices.set(name, (await handle.getFile()).size);
      }
    } catch {
      // An unreadable folder holds nothing.
    }
    return slices;
  }

  /** @param {string} slice */
  async read(slice) {
    try {
      const file = await (await this.folder.getFileHandle(slice)).getFile();
      return new Uint8Array(await file.arrayBuffer());
    } catch {
      return null;
    }
  }

  /** @param {string} slice @param {Uint8Array} data */
  async write(slice, data) {
    let access;
    try {
      access = await (await this.folder.getFileHandle(slice, { create: true })).createSyncAccessHandle();
    } catch (error) {
      if (error instanceof DOMException && error.name === 'QuotaExceededError') return /** @type {const} */ ('full');
      return /** @type {const} */ ('refused'); // another tab writes the same slice: it is not ours to remove
    }
    let written = 0;
    try {
      await access.truncate(0); // a promise in Safari before 16.4, as all of these but write
      written = access.write(data, { at: 0 });
      await access.flush();
    } catch {
      written = -1; // QuotaExceededError
    }
    await access.close();
    if (written === data.length) return /** @type {const} */ ('kept');
    await this.remove(slice);
    return /** @type {const} */ ('full');
  }

  /** @param {string} slice */
  async remove(slice) {
    try {
      await this.folder.removeEntry(slice);
    } catch {
      // Gone already, or in use by another tab.
    }
  }
}

/** @returns {Promise<SliceStore>} */
async function openCache() {
  return new CacheStore(await caches.open(CACHE));
}

/** One response per slice. @implements {SliceStore} */
export class CacheStore {
  /** @readonly */
  kind = /** @type {const} */ ('cache');

  /** @param {Cache} cache */
  constructor(cache) {
    this.cache = cache;
  }

  async list() {
    /** @type {Map<string, number>} */
    const slices = new Map();
    try {
      for (const request of await this.cache.keys()) {
        const name = new URL(request.url).pathname.split('/').pop() ?? '';
        const response = SLICE_NAME.test(name) ? await this.cache.match(request) : undefined;
        if (response) slices.set(name, Number(response.headers.get('content-length')));
      }
    } catch {
      // An unreadable cache holds nothing.
    }
    return slices;
  }

  /** @param {string} slice */
  async read(slice) {
    try {
      const response = await this.cache.match(`/kept/${slice}`);
      return response ? new Uint8Array(await response.arrayBuffer()) : null;
    } catch {
      return null;
    }
  }

  /** @param {string} slice @param {Uint8Array} data */
  async write(slice, data) {
    try {
      const headers = { 'content-length': String(data.length), 'content-type': 'application/octet-stream' };
      await this.cache.put(`/kept/${slice}`, new Response(/** @type {any} */ (data), { headers }));
      return /** @type {const} */ ('kept');
    } catch {
      await this.remove(slice); // QuotaExceededError
      return /** @type {const} */ ('full');
    }
  }

  /** @param {string} slice */
  async remove(slice) {
    try {
      await this.cache.delete(`/kept/${slice}`);
    } catch {
      // Gone already.
    }
  }
}

/**
 * A store within a budget, which nobody ever has to wait for: one write at a time, in the background, each with a time
 * limit. Makes room by dropping slices that are no longer wanted, and gives up quietly.
 */
export class Keeper {
  /** @param {SliceStore} store @param {number} budgetBytes @param {number} [limitMs] */
  constructor(store, budgetBytes, limitMs = LIMIT_MS) {
    this.store = store;
    this.budgetBytes = budgetBytes;
    this.limitMs = limitMs;
    /** Why slices are not kept although the budget allows it. @type {'' | 'full' | 'stuck'} */
    this.trouble = '';
    /** @type {Map<string, number>} */
    this.kept = new Map();
    this.pendingBytes = 0;
    this.stuck = 0; // operations that never ended
    this.tail = Promise.resolve();
  }

  /** Look at what former visits left. */
  async open() {
    this.kept = await this.limited(this.store.list(), new Map());
  }

  /** @returns {string[]} */
  inventory() {
    return [...this.kept.keys()].filter((name) => !isPart(name)).sort();
  }

  /** @returns {number} */
  get keptBytes() {
    return [...this.kept.values()].reduce((sum, size) => sum + size, 0);
  }

  /** The bytes as they were found; the caller checks them. @param {string} slice @returns {Promise<Uint8Array | null>} */
  async read(slice) {
    return this.kept.has(slice) ? this.limited(this.store.read(slice), null) : null;
  }

  /** Write when the writes before it are done. @param {string} slice @param {Uint8Array} data @param {(slice: string) => boolean} wanted */
  write(slice, data, wanted) {
    if ((this.kept.has(slice) && !isPart(slice)) || this.trouble === 'stuck') return;
    this.pendingBytes += data.length;
    this.tail = this.tail.then(async () => {
      await this.writeNow(slice, data, wanted);
      this.pendingBytes -= data.length;
    });
  }

  /** Wait until not too much waits to be written, so that memory stays bounded. */
  async room() {
    if (this.pendingBytes > PENDING_BYTES) await this.tail;
  }

  /** Wait for the writes asked for so far. */
  async idle() {
    await this.tail;
  }

  /** @param {string} slice @param {Uint8Array} data @param {(slice: string) => boolean} wanted */
  async writeNow(slice, data, wanted) {
    await this.makeRoom(data.length, wanted);
    if (this.trouble === 'stuck' || this.keptBytes + data.length > this.budgetBytes) return;
    const outcome = await this.limited(this.store.write(slice, data), 'refused');
    if (outcome === 'kept') this.kept.set(slice, data.length);
    if (outcome === 'full') this.trouble = 'full';
  }

  /** @param {number} sizeBytes @param {(slice: string) => boolean} wanted */
  async makeRoom(sizeBytes, wanted) {
    for (const slice of [...this.kept.keys()]) {
      if (this.keptBytes + sizeBytes <= this.budgetBytes && this.trouble !== 'full') return;
      if (!wanted(slice)) await this.remove(slice);
    }
  }

  /** @param {string} slice */
  async remove(slice) {
    this.kept.delete(slice);
    if (this.trouble === 'full') this.trouble = '';
    await this.limited(this.store.remove(slice), undefined);
  }

  /** Delete everything this page ever kept; what could not be deleted is kept still. @returns {Promise<number>} bytes that are gone */
  async clear() {
    await this.idle();
    await this.open();
    const before = this.keptBytes;
    for (const slice of [...this.kept.keys()]) await this.remove(slice);
    await this.open();
    return before - this.keptBytes;
  }

  /** What a store answers, or `instead` when it never does. @template T @param {Promise<T>} answer @param {T} instead */
  limited(answer, instead) {
    return within(this.limitMs, answer, () => {
      this.stuck += 1;
      if (this.stuck >= MOST_STUCK) this.trouble = 'stuck';
      return instead;
    });
  }
}
