/**
 * Read JSON payloads strictly: every key has a type and a bound, and a breach names frame and key.
 * Mirrors `relay/wire/fields.py`. Unknown keys are ignored, so that a newer peer may say more.
 */

import { RemoteProtocolError } from './errors.js';

const INDEX = /^(0|[1-9][0-9]{0,4})$/;
const HEX = /^[0-9a-f]*$/;
const SURROGATE = /\p{Surrogate}/u; // with the u flag it matches lone ones only

/** One JSON object under inspection; `where` names it in errors, like `Assign.layers[3]`. */
export class Fields {
  /**
   * @param {string} where
   * @param {unknown} value
   */
  constructor(where, value) {
    if (typeof value !== 'object' || value === null || Array.isArray(value)) {
      throw new RemoteProtocolError(`${where}: an object is needed`);
    }
    this.where = where;
    /** The whole object, keys nobody asked for included. */
    this.json = /** @type {Record<string, any>} */ (value);
  }

  /**
   * Parse one UTF-8 JSON object.
   * @param {string} where
   * @param {Uint8Array} payload
   */
  static parse(where, payload) {
    let value;
    try {
      value = JSON.parse(new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(payload));
    } catch {
      throw new RemoteProtocolError(`${where}: not one UTF-8 JSON object`);
    }
    return new Fields(where, value);
  }

  /**
   * The value as it stands; refused when missing.
   * @param {string} key
   * @returns {any}
   */
  raw(key) {
    if (!Object.hasOwn(this.json, key)) throw new RemoteProtocolError(`${this.where}.${key} is missing`);
    return this.json[key];
  }

  /**
   * Whether the key is there and not null.
   * @param {string} key
   */
  has(key) {
    return Object.hasOwn(this.json, key) && this.json[key] !== null;
  }

  /**
   * @param {string} key
   * @param {string} expected
   * @returns {never}
   */
  fail(key, expected) {
    const value = Object.hasOwn(this.json, key) ? this.json[key] : undefined;
    const found = typeof value === 'object' ? (value === null ? 'null' : 'an object') : String(value).slice(0, 60);
    throw new RemoteProtocolError(`${this.where}.${key}: ${expected} is needed, not ${found}`);
  }

  /**
   * @param {string} key
   * @param {number} maxChars
   * @returns {string}
   */
  text(key, maxChars) {
    const value = this.raw(key);
    if (typeof value !== 'string' || (value.length > maxChars && [...value].length > maxChars)) {
      this.fail(key, `a string of at most ${maxChars} characters`);
    }
    if (SURROGATE.test(value)) this.fail(key, 'a string without lone surrogates');
    return value;
  }

  /**
   * @template {string} T
   * @param {string} key
   * @param {readonly T[]} allowed
   * @returns {T}
   */
  oneOf(key, allowed) {
    const value = this.raw(key);
    if (!allowed.includes(value)) this.fail(key, `one of ${allowed.join(', ')}`);
    return value;
  }

  /**
   * @param {string} key
   * @param {number} chars
   * @returns {string}
   */
  hex(key, chars) {
    const value = this.raw(key);
    if (!isHex(value, chars)) this.fail(key, `${chars} lower-case hex digits`);
    return value;
  }

  /**
   * @param {string} key
   * @param {number} low
   * @param {number} high
   * @returns {number}
   */
  integer(key, low, high) {
    const value = this.raw(key);
    if (!Number.isInteger(value) || value < low || value > high) this.fail(key, `an integer from ${low} to ${high}`);
    return value;
  }

  /**
   * @param {string} key
   * @param {number} low
   * @param {number} high
   * @returns {number}
   */
  number(key, low, high) {
    const value = this.raw(key);
    if (typeof value !== 'number' || !(value >= low && value <= high)) this.fail(key, `a number from ${low} to ${high}`);
    return value;
  }

  /**
   * @param {string} key
   * @returns {boolean}
   */
  boolean(key) {
    const value = this.raw(key);
    if (typeof value !== 'boolean') this.fail(key, 'true or false');
    return value;
  }

  /**
   * @param {string} key
   * @param {number} maxItems
   * @returns {any[]}
   */
  array(key, maxItems) {
    const value = this.raw(key);
    if (!Array.isArray(value) || value.length > maxItems) this.fail(key, `an array of at most ${maxItems} items`);
    return value;
  }

  /**
   * @param {string} key
   * @param {number} maxItems
   */
  objects(key, maxItems) {
    return this.array(key, maxItems).map((item, i) => new Fields(`${this.where}.${key}[${i}]`, item));
  }

  /** @param {string} key */
  object(key) {
    return new Fields(`${this.where}.${key}`, this.raw(key));
  }

  /**
   * @param {string} key
   * @param {number} chars
   * @param {number} maxItems
   * @returns {string[]}
   */
  hexes(key, chars, maxItems) {
    const values = this.array(key, maxItems);
    if (!values.every((value) => isHex(value, chars))) this.fail(key, `an array of ${chars} lower-case hex digits each`);
    return values;
  }

  /**
   * @param {string} key
   * @param {number} low
   * @param {number} high
   * @param {number} maxItems
   * @returns {number[]}
   */
  integers(key, low, high, maxItems) {
    const values = this.array(key, maxItems);
    if (!values.every((value) => Number.isInteger(value) && value >= low && value <= high)) {
      this.fail(key, `an array of integers from ${low} to ${high}`);
    }
    return values;
  }

  /**
   * The keys of an object whose keys are indices written in decimal, like `{"0": …, "17": …}`.
   * @returns {string[]}
   */
  indices() {
    const keys = Object.keys(this.json);
    for (const key of keys) {
      if (!INDEX.test(key) || Number(key) > 0xffff) {
        throw new RemoteProtocolError(`${this.where}: key ${key.slice(0, 20)} is no index`);
      }
    }
    return keys;
  }
}

/**
 * Whether `value` is a string of exactly `chars` lower-case hex digits.
 * @param {unknown} value
 * @param {number} chars
 */
export function isHex(value, chars) {
  return typeof value === 'string' && value.length === chars && HEX.test(value);
}
