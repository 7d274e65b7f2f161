/** Name the close codes a session may end with; mirrors `relay/wire/close.py`. See PROTOCOL.md, "Close codes". */

export const CloseCode = Object.freeze({
  NORMAL: 1000,
  GOING_AWAY: 1001, // RFC 6455 section 7.4.1
  MESSAGE_TOO_BIG: 1009, // RFC 6455 section 7.4.1: said by the WebSocket layer, or a proxy's
  NO_STATUS: 1005, // never sent: the transport ended without a close frame
  PROTOCOL: 4400,
  AUTH: 4401,
  TIMEOUT: 4408,
  REPLACED: 4409,
  TOO_LARGE: 4413,
  VERSION: 4426,
  OVERLOADED: 4429,
});

/** After these a client must not try again unchanged: the same bytes would fail the same way. @type {Set<number>} */
export const FATAL = new Set([
  CloseCode.MESSAGE_TOO_BIG,
  CloseCode.PROTOCOL,
  CloseCode.AUTH,
  CloseCode.REPLACED,
  CloseCode.TOO_LARGE,
  CloseCode.VERSION,
]);

/** For people, where the other end gave no reason. @type {Map<number, string>} */
export const WORDS = new Map([
  [0, 'nobody answers there'],
  [CloseCode.NORMAL, 'the connection was closed'],
  [CloseCode.GOING_AWAY, 'the other end stopped'],
  [CloseCode.NO_STATUS, 'the connection was closed'],
  [CloseCode.MESSAGE_TOO_BIG, 'a message was too long for what is in between'],
  [CloseCode.PROTOCOL, 'one end could not read the other'],
  [CloseCode.AUTH, 'this identity was refused'],
  [CloseCode.TIMEOUT, 'nothing came for too long'],
  [CloseCode.REPLACED, 'a newer session took this one’s place'],
  [CloseCode.TOO_LARGE, 'a message was too long'],
  [CloseCode.VERSION, 'the two ends speak different versions'],
  [CloseCode.OVERLOADED, 'too many want the same'],
]);

const MAX_REASON_BYTES = 123; // RFC 6455 section 5.5

/**
 * Say whether a client may reconnect after a session ended with `code`.
 * @param {number} code
 */
export function mayReconnect(code) {
  return !FATAL.has(code);
}

/** Say why a session ended; numbers are for machines. @param {number} code @param {string} reason */
export function inWords(code, reason) {
  return reason || (WORDS.get(code) ?? 'the connection broke');
}

/**
 * Shorten `reason` to what a close frame can carry, without cutting a character in half.
 * @param {string} reason
 */
export function clipReason(reason) {
  const bytes = new TextEncoder().encode(reason).subarray(0, MAX_REASON_BYTES);
  return new TextDecoder().decode(bytes).replace(/\ufffd+$/u, '');
}
