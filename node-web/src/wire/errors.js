/** Say whose fault it is when bytes or calls do not fit the protocol; mirrors `relay/wire/errors.py`. */

import { CloseCode } from './close.js';

/** Any breach of the wire protocol. `code` is spelled as in Python. */
export class WireError extends Error {
  /**
   * @param {string} message
   * @param {string} code
   */
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

/** We tried to say or encode something the protocol does not allow: a bug here. */
export class LocalProtocolError extends WireError {
  /** @param {string} message */
  constructor(message) {
    super(message, 'local_protocol');
  }
}

/** The peer sent something the protocol does not allow: close with `closeCode`, do not retry unchanged. */
export class RemoteProtocolError extends WireError {
  /**
   * @param {string} message
   * @param {string} [code]
   * @param {number} [closeCode]
   */
  constructor(message, code = 'remote_protocol', closeCode = CloseCode.PROTOCOL) {
    super(message, code);
    this.closeCode = closeCode;
  }
}

/** A frame is longer than its type may be. */
export class FrameTooLarge extends RemoteProtocolError {
  /**
   * @param {string} what
   * @param {number} sizeBytes
   * @param {number} limitBytes
   */
  constructor(what, sizeBytes, limitBytes) {
    const message = `${what}: ${sizeBytes} bytes, at most ${limitBytes} are allowed`;
    super(message, 'frame_too_large', CloseCode.TOO_LARGE);
    this.sizeBytes = sizeBytes;
    this.limitBytes = limitBytes;
  }
}

/** The peer speaks another version of the protocol. */
export class VersionMismatch extends RemoteProtocolError {
  /**
   * @param {number} found
   * @param {number} supported
   */
  constructor(found, supported) {
    super(`protocol version ${found}, this side speaks ${supported}`, 'version_mismatch', CloseCode.VERSION);
    this.found = found;
    this.supported = supported;
  }
}

/**
 * A sealed frame does not open, came twice, or came unsealed; or a key is not signed as it must be. The fault of the
 * relay between the two ends, or of the peer; the bytes do not tell which. It fails one call and ends no session.
 */
export class SealFault extends RemoteProtocolError {
  /**
   * @param {'altered'|'repeated'|'unsealed'|'no_key'|'unsigned'|'other_identity'} why
   * @param {string} message
   */
  constructor(why, message) {
    super(message, 'bad_seal');
    this.why = why;
  }
}
