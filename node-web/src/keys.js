/**
 * Keep this device's long-lived key: in IndexedDB, where no script can read its private half. Private windows and
 * browsers that do not store keys get a fresh one at each start.
 */

import { newIdentity, whyNoSeal } from './wire/seal.js';

const DATABASE = 'expertswarm-keys';
const STORE = 'keys';
const NAME = 'seal';
const OPEN_MS = 3000; // some browsers never answer in private windows

/**
 * @typedef {import('./wire/seal.js').SealIdentity} SealIdentity
 * @typedef {import('./wire/sealing.js').SealPolicy} SealPolicy
 */

/** What this page can do. @param {string|null} pinned @returns {Promise<SealPolicy>} */
export async function sealPolicy(pinned) {
  const why = await whyNoSeal();
  return why === null ? { identity: await keptIdentity(), why: '', pinned } : { identity: null, why, pinned };
}

/** @returns {Promise<SealIdentity>} */
async function keptIdentity() {
  try {
    const database = await open();
    const known = await done(database.transaction(STORE).objectStore(STORE).get(NAME));
    if (known !== undefined) return known;
    const fresh = await newIdentity();
    await done(database.transaction(STORE, 'readwrite').objectStore(STORE).put(fresh, NAME));
    return fresh;
  } catch {
    return newIdentity();
  }
}

/** @returns {Promise<IDBDatabase>} */
function open() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE);
  const late = new Promise((_, reject) => setTimeout(() => reject(new Error('the browser’s storage does not answer')), OPEN_MS));
  return Promise.race([done(request), /** @type {Promise<never>} */ (late)]);
}

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
