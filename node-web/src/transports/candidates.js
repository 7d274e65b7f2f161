/**
 * Which ICE candidates of the other end are tried: few, and none that make us send where no peer can be. Mirrors
 * `backbone/lanes/ice.py`; both read tests/vectors/candidates.json.
 */

export const MAX_CANDIDATES = 16;
export const MAX_PER_ADDRESS = 4; // many ports of one address are a scan

/** The candidates of one data channel, those of its description and those that come later together. */
export class Candidates {
  constructor() {
    /** Address and port. @type {Map<string, string>} */
    this.taken = new Map();
  }

  /** Whether to try this one. @param {string} candidate */
  take(candidate) {
    const line = candidate.replace(/[\r\n]+$/, '').replace(/^[\r\n]+/, '');
    if (!/^[ -~]*$/.test(line)) return false;
    const fields = line.split(' ').filter((field) => field !== '');
    if (fields.length < 8) return false;
    const [address, port] = fields.slice(4, 6);
    const key = `${address} ${port}`;
    if (isSpecial(address) || this.taken.has(key) || this.taken.size >= MAX_CANDIDATES) return false;
    if ([...this.taken.values()].filter((taken) => taken === address).length >= MAX_PER_ADDRESS) return false;
    this.taken.set(key, address);
    return true;
  }

  /** Take the candidates that are not tried out of a session description. @param {string} sdp */
  of(sdp) {
    const lines = sdp.split('\n');
    return lines.filter((line) => !line.startsWith('a=candidate:') || this.take(line)).join('\n');
  }
}

/**
 * Whether no peer can be here: no address at all, this machine, a link, a group, a provider's own network.
 * @param {string} address
 */
export function isSpecial(address) {
  const four = fourBytes(address);
  if (four !== null) return isSpecialFour(four);
  const groups = eightGroups(address);
  if (groups === null) return true;
  if (groups.slice(0, 5).every((group) => group === 0) && groups[5] === 0xffff) {
    return isSpecialFour([groups[6] >> 8, groups[6] & 255, groups[7] >> 8, groups[7] & 255]);
  }
  const isGlobal = (groups[0] & 0xe000) === 0x2000;
  const isUnique = (groups[0] & 0xfe00) === 0xfc00;
  return !isGlobal && !isUnique;
}

/**
 * How far a host of a URL is: from everywhere, from its own network, or from its own machine; none: no peer can be
 * there. A name counts as public but for those that never are.
 * @param {string} hostname
 * @returns {'public'|'private'|'loopback'|'shared'|'none'}
 */
export function reachOf(hostname) {
  const host = hostname.replace(/^\[|\]$/g, '').replace(/\.$/, '');
  const groups = eightGroups(host);
  const mapped = groups?.slice(0, 5).every((group) => group === 0) && groups[5] === 0xffff ? groups : null;
  const four = mapped ? [mapped[6] >> 8, mapped[6] & 255, mapped[7] >> 8, mapped[7] & 255] : fourBytes(host);
  if (four !== null) {
    const [a, b] = four;
    if (a === 127) return 'loopback';
    if (a === 100 && (b & 0xc0) === 64) return 'shared';
    if (isSpecialFour(four)) return 'none';
    return a === 10 || (a === 172 && (b & 0xf0) === 16) || (a === 192 && b === 168) ? 'private' : 'public';
  }
  if (groups !== null) {
    if (groups.slice(0, 7).every((group) => group === 0) && groups[7] === 1) return 'loopback';
    if (isSpecial(host)) return 'none';
    return (groups[0] & 0xfe00) === 0xfc00 ? 'private' : 'public';
  }
  if (/(^|\.)localhost$/.test(host)) return 'loopback';
  return /(^[^.]*|\.(local|lan|internal|home\.arpa))$/.test(host) ? 'private' : 'public';
}

/** @param {number[]} bytes */
function isSpecialFour([a, b]) {
  return a === 0 || a === 127 || a >= 224 || (a === 169 && b === 254) || (a === 100 && (b & 0xc0) === 64);
}

/** @param {string} address @returns {number[]|null} */
function fourBytes(address) {
  if (!/^(0|[1-9]\d{0,2})(\.(0|[1-9]\d{0,2})){3}$/.test(address)) return null;
  const bytes = address.split('.').map(Number);
  return bytes.every((byte) => byte < 256) ? bytes : null;
}

/** An IPv6 address as the URL standard reads it. @param {string} address @returns {number[]|null} */
function eightGroups(address) {
  if (!/^[0-9a-fA-F:.]+$/.test(address) || !address.includes(':')) return null;
  let read;
  try {
    read = new URL(`http://[${address}]/`).hostname.slice(1, -1);
  } catch {
    return null;
  }
  const [head, tail] = read.split('::').map((part) => (part ? part.split(':') : []));
  const gap = tail === undefined ? [] : Array(8 - head.length - tail.length).fill('0');
  return [...head, ...gap, ...(tail ?? [])].map((group) => parseInt(group, 16));
}
