/**
 * What can go wrong on the page, and whose fault it is; `code` is spelled as in Python.
 *
 *   NodeError
 *   ├── SliceFault      a slice could not be had, or is not what its name says: fetched again later
 *   ├── Unreachable     the network or the relay fails at the moment: tried again
 *   ├── KernelFault     this device does not compute what the contract says: it must not serve
 *   └── CallRefused     one dispatch cannot be computed; its code is one of the Failure codes
 */

/** Root of the tree. */
export class NodeError extends Error {
  /** @param {string} code @param {string} message */
  constructor(code, message) {
    super(message);
    this.name = new.target.name;
    this.code = code;
  }
}

export class SliceFault extends NodeError {
  /** @param {string} slice @param {string} why @param {import('./holdings.js').FailureKind} [kind] */
  constructor(slice, why, kind = 'network') {
    super('slice_fault', `slice ${slice.slice(0, 12)}: ${why}`);
    this.slice = slice;
    this.kind = kind;
  }
}

export class Unreachable extends NodeError {
  /** @param {string} message */
  constructor(message) {
    super('unreachable', message);
  }
}

export class KernelFault extends NodeError {
  /** @param {string} message */
  constructor(message) {
    super('kernel_fault', message);
  }
}

export class CallRefused extends NodeError {}

/** Its code, empty where it has none. @param {unknown} error @returns {string} */
export function codeOf(error) {
  const code = error instanceof Error && 'code' in error ? error.code : '';
  return typeof code === 'string' ? code : ''; // DOMExceptions have numbers
}

/** The message of whatever was thrown. @param {unknown} error @returns {string} */
export function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}
