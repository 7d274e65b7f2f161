/** What the page remembers between visits: who it is and what was chosen. In memory only where storage is blocked. */

/** @type {Map<string, string>} */
const fallback = new Map();

/** @param {string} key @returns {string|null} */
export function recall(key) {
  try {
    return localStorage.getItem(key) ?? fallback.get(key) ?? null;
  } catch {
    return fallback.get(key) ?? null;
  }
}

/** @param {string} key @param {string} value */
export function remember(key, value) {
  fallback.set(key, value);
  try {
    localStorage.setItem(key, value);
  } catch {
    // Private browsing: the page's own memory has to do.
  }
}

/** Notes that outlive the tab. */
export const deviceNotes = { get: recall, set: remember };

/** Notes that end with the tab. */
export const tabNotes = {
  /** @param {string} key @returns {string|null} */
  get(key) {
    try {
      return sessionStorage.getItem(key);
    } catch {
      return null;
    }
  },
  /** @param {string} key @param {string} value */
  set(key, value) {
    try {
      sessionStorage.setItem(key, value);
    } catch {
      // Storage is blocked: a reload asks again.
    }
  },
};

/** This device's random name and the secret that proves a reconnect is the same device. */
export function identity() {
  return { id: hexOnce('node-id'), secret: hexOnce('node-secret') };
}

/** 128 random bits, made at the first visit. @param {string} key */
function hexOnce(key) {
  const known = recall(key);
  if (known !== null && /^[0-9a-f]{32}$/.test(known)) return known;
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // exists without a secure context too
  const fresh = [...bytes].map((byte) => byte.toString(16).padStart(2, '0')).join('');
  remember(key, fresh);
  return fresh;
}

const KNOWN = 'backbone-keys';
const KNOWN_KEPT = 20;

/**
 * Remember a backbone's fingerprint; give the last other one when this one is new and not the first.
 * @param {string} backbone
 * @returns {string|null}
 */
export function meetBackbone(backbone) {
  const known = (recall(KNOWN) ?? '').split(' ').filter(Boolean);
  if (known.includes(backbone)) return null;
  remember(KNOWN, [...known, backbone].slice(-KNOWN_KEPT).join(' '));
  return known.at(-1) ?? null;
}
