/**
 * Keep slices on the device between visits: in the origin private file system, else the Cache API, else not at all.
 *
 * A store promises nothing: browsers evict, quotas change, a write may stop half-way. So whoever reads checks the
 * bytes against their name again (`client.js`), and every method answers instead of throwing.
 */

const FOLDER = 'slices';
const CACHE = 'slices-v1';
const PROBE = 'probe';
const SLICE_NAME = /^[0-9a-f]{64}$/;

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
    try {
      const store = await open();
      const data = Uint8Array.of(1, 2, 3);
      if ((await store.write(PROBE, data)) === 'kept') {
        const back = await store.read(PROBE);
        await store.remove(PROBE);
        if (back !== null && back.length === 3 && back[2] === 3) return store;
      }
    } catch {
      // Not here: no secure context, private browsing, or storage is blocked. The next one may work.
    }
  }
  return new NoStore();
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
    } catch {
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
 * A store within a budget: makes room by dropping slices nobody wants any more, and gives up quietly when full.
 */
export class Keeper {
  /** @param {SliceStore} store @param {number} budgetBytes */
  constructor(store, budgetBytes) {
    this.store = store;
    this.budgetBytes = budgetBytes;
    this.full = false; // the browser refused a write although the budget allowed it
    /** @type {Map<string, number>} */
    this.kept = new Map();
  }

  /** Look at what former visits left. */
  async open() {
    this.kept = await this.store.list();
  }

  /** @returns {string[]} */
  inventory() {
    return [...this.kept.keys()].sort();
  }

  /** @returns {number} */
  get keptBytes() {
    return [...this.kept.values()].reduce((sum, size) => sum + size, 0);
  }

  /** The bytes as they were found; the caller checks them. @param {string} slice @returns {Promise<Uint8Array | null>} */
  async read(slice) {
    return this.kept.has(slice) ? this.store.read(slice) : null;
  }

  /** @param {string} slice @param {Uint8Array} data @param {(slice: string) => boolean} wanted */
  async write(slice, data, wanted) {
    if (this.kept.has(slice)) return;
    await this.makeRoom(data.length, wanted);
    if (this.keptBytes + data.length > this.budgetBytes) return;
    const outcome = await this.store.write(slice, data);
    if (outcome === 'kept') this.kept.set(slice, data.length);
    if (outcome === 'full') this.full = true;
  }

  /** @param {number} sizeBytes @param {(slice: string) => boolean} wanted */
  async makeRoom(sizeBytes, wanted) {
    for (const slice of [...this.kept.keys()]) {
      if (this.keptBytes + sizeBytes <= this.budgetBytes && !this.full) return;
      if (!wanted(slice)) await this.remove(slice);
    }
  }

  /** @param {string} slice */
  async remove(slice) {
    this.kept.delete(slice);
    this.full = false;
    await this.store.remove(slice);
  }

  /** Delete everything this page ever kept. */
  async clear() {
    for (const slice of [...(await this.store.list()).keys()]) await this.remove(slice);
    this.kept.clear();
  }
}
