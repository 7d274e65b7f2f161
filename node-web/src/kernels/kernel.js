/**
 * What every kernel of a node can do; `wasm.js` is one. The numbers mean what wasm/CONTRACT.md says.
 *
 * They keep packed experts in their own memory; whoever packs frees. A kernel on the caller's own thread answers at once;
 * one with workers or a graphics device answers with promises.
 */
import { KernelFault, NodeError } from '../errors.js';

/**
 * How an expert computes, as it stands in the manifest (backbone/model/formula.py).
 * @typedef {{
 *   hidden_dim: number, expert_dim: number, gate_type: number | null, up_type: number, down_type: number,
 *   activation: string, alpha: number, limit: number, weight_position: string, biased: boolean, scaled?: boolean,
 * }} Formula
 */

/**
 * One dispatch, ready to compute.
 * @typedef {{
 *   formula: Formula,
 *   numTokens: number,
 *   x: Uint8Array,                               // numTokens rows in `encoding`
 *   encoding: number,                            // 0 f32, 1 f16, 2 q8a32, 3 q8a256
 *   rowExponents: Int16Array,                    // [numTokens]
 *   grid: number,                                // 0 x32, 1 x16
 *   layerExponents: number | ArrayLike<number>,  // x32: one number; x16: [hidden_dim]
 *   counts: Uint16Array,                         // [numTokens] picks of each row
 *   experts: readonly PackedExpert[],
 *   pickExpert: Uint16Array,                     // row by row, index into `experts`
 *   pickWeight: Float32Array,
 * }} Call
 */

/** A partial as it travels: a width (2, 4 or 8 bytes) per row, and the rows, each padded to 8 bytes. @typedef {{ widths: Uint8Array, data: Uint8Array }} EncodedPartial */

/**
 * @typedef {object} Kernel
 * @property {string} build which kernel this is, as nodes announce it ("wasm-plain")
 * @property {number} usedBytes memory held by packed experts and working space
 * @property {() => void|Promise<void>} knownAnswerTest throws KernelFault when this device computes anything else than the contract
 * @property {(formula: Formula, slice: Uint8Array, trial?: boolean) => PackedExpert|Promise<PackedExpert>} pack gate, up, down as in the GGUF,
 *   rearranged; throws CallRefused or KernelMemoryFull; `trial`: not kept for long, so any build will do
 * @property {(expert: PackedExpert) => void} free give the memory of an expert back; twice is harmless
 * @property {(call: Call) => EncodedPartial|Promise<EncodedPartial>} partial the sums of a dispatch, encoded for the wire; throws CallRefused
 * @property {(data: Uint8Array) => string} sha256 lower-case hex
 * @property {number} [width] how many calls it can work at, 1 when it does not say
 * @property {() => void} [prepare] it is proven, and the node makes its offer: get meanwhile what the first slice will wait for
 * @property {() => void} [close] give all memory back
 * @property {(formula: Formula) => string|null} [refusal] what this kernel cannot compute though others can
 */

/** One expert in the kernel's memory. Only its kernel reads the fields; `sizeBytes` is 0 once freed. */
export class PackedExpert {
  /** @param {number} address @param {number} sizeBytes */
  constructor(address, sizeBytes) {
    this.address = address;
    this.sizeBytes = sizeBytes;
  }
}

/** The device gives no more memory, or the limit set for this kernel is reached. */
export class KernelMemoryFull extends NodeError {
  /** @param {number} wantedBytes @param {number} usedBytes */
  constructor(wantedBytes, usedBytes) {
    super('memory_full', `no memory for ${wantedBytes} bytes more (${usedBytes} in use)`);
    this.wantedBytes = wantedBytes;
    this.usedBytes = usedBytes;
  }
}

/** One build of a kernel gave a wrong answer; another may give the right one. */
export class BuildFault extends KernelFault {
  /** @param {string} build as the kernel calls itself @param {string} message */
  constructor(build, message) {
    super(message);
    this.build = build;
  }
}
