/**
 * The C kernel (wasm/expert.h) compiled to WebAssembly SIMD: `kernel.js` implemented by 50 KB and this page.
 *
 * Works in a worker and in node, needs no secure context. The memory may grow at any take(), which detaches every view:
 * views are made anew after it. Sizes come back as signed 32-bit numbers (negative: an error), addresses as unsigned.
 */
import { KernelFault, messageOf } from '../errors.js';
import { Heap, roundUp } from './heap.js';
import { BuildFault, KernelMemoryFull, PackedExpert } from './kernel.js';
import { check, describe } from './refusals.js';

/** @typedef {import('./kernel.js').Formula} Formula */
/** @typedef {import('./kernel.js').Kernel} Kernel */
/** @typedef {import('./kernel.js').Call} Call */
/** @typedef {import('./kernel.js').EncodedPartial} EncodedPartial */
/** @typedef {(...args: number[]) => number} CFunction */
/** @typedef {readonly [number, number, number, number]} Rows  first and end unit of the hidden layer, first and end channel; multiples of 16 or the end */

const ABI_VERSION = 1;
const SELF_TEST_ROWS = [2, 7]; // together they have a tile of every size
const MAX_SELF_TESTS = 16; // for one formula
const ACTIVATIONS = ['silu', 'gelu', 'relu', 'relu2', 'swiglu_oai', 'swiglu_clamp', 'situ']; // enum expert_activation
const WEIGHT_POSITIONS = ['after', 'before']; // enum expert_weight_position
const FORMULA_BYTES = 40;
const CALL_WORDS = 18; // ExpertCall
const ROWS_BYTES = 16; // ExpertRows
const PIECE_BYTES = 1 << 20; // of a slice at once: no second copy of it is in this memory
const MAX_MEMORY = 65536 * 65535; // 4 GiB less one page

/** @implements {Kernel} */
export class WasmKernel {
  /** @type {Heap} */ #heap;
  /** @type {Record<string, CFunction>} */ #c;
  #work = { at: 0, size: 0 }; // working space, reused from call to call
  /** @type {Set<number>} known-answer tests that were passed */ #passed = new Set();
  /** @type {Set<string>} formulas whose tests were passed */ #proven = new Set();

  /**
   * @param {string | URL | BufferSource | WebAssembly.Module} source where the .wasm is, its bytes, or what was compiled
   * @param {{ limitBytes?: number, skipBytes?: number }} [options] the most memory this kernel may ever take; what it leaves unused (tests)
   */
  static async load(source, { limitBytes = MAX_MEMORY, skipBytes = 0 } = {}) {
    let bytes = source;
    if (typeof bytes === 'string' || bytes instanceof URL) {
      const response = await fetch(bytes);
      if (!response.ok) throw new KernelFault(`${source}: HTTP ${response.status}`);
      bytes = await response.arrayBuffer();
    }
    let module;
    try {
      module = bytes instanceof WebAssembly.Module ? bytes : await WebAssembly.compile(bytes);
    } catch (error) {
      throw new KernelFault(`this browser cannot run the kernel (WebAssembly SIMD): ${messageOf(error)}`);
    }
    return WasmKernel.from(module, { limitBytes, skipBytes });
  }

  /** The same at once, from what was compiled. @param {WebAssembly.Module} module @param {{ limitBytes?: number, skipBytes?: number }} [options] */
  static from(module, { limitBytes = MAX_MEMORY, skipBytes = 0 } = {}) {
    let instance;
    try {
      instance = new WebAssembly.Instance(module, {});
    } catch (error) {
      throw new KernelFault(`this browser cannot run the kernel: ${messageOf(error)}`);
    }
    return new WasmKernel(instance, Math.min(limitBytes, MAX_MEMORY), skipBytes);
  }

  /** @param {WebAssembly.Instance} instance @param {number} limitBytes @param {number} skipBytes */
  constructor(instance, limitBytes, skipBytes) {
    const { memory, __heap_base: base, ...functions } = /** @type {any} */ (instance.exports);
    this.#c = functions;
    if (this.#c.expert_abi_version() !== ABI_VERSION) throw new KernelFault('the kernel is of another version than the page');
    this.#heap = new Heap(memory, (base.value >>> 0) + skipBytes, limitBytes);
    this.build = this.#text(this.#c.expert_build() >>> 0);
  }

  get usedBytes() {
    return this.#heap.usedBytes;
  }

  /**
   * The tests before all others, and again those of every formula met so far: engines compile hot code anew, and have got it wrong.
   * Throws KernelFault.
   */
  knownAnswerTest() {
    this.#run(new Set([...this.#testsFor(null), ...this.#passed]), true);
  }

  /**
   * The tests that slices of this formula need, unless they were passed; pack() sees to it itself. Throws KernelFault, CallRefused.
   * @param {Formula} formula
   * @param {boolean} [again] though they were passed
   */
  prove(formula, again = false) {
    const key = JSON.stringify(formula);
    if (this.#proven.has(key) && !again) return;
    this.#run(this.#testsFor(formula), again);
    this.#proven.add(key);
  }

  /** Bytes of a slice. Throws CallRefused. @param {Formula} formula */
  sliceBytes(formula) {
    const [formulaAt] = this.#reserve(FORMULA_BYTES);
    this.#putFormula(formulaAt, formula);
    return check(this.#c.expert_slice_bytes(formulaAt), 'formula refused');
  }

  /** @param {Formula|null} formula @returns {Iterable<number>} */
  #testsFor(formula) {
    const [formulaAt, testsAt] = this.#reserve(FORMULA_BYTES, MAX_SELF_TESTS * 4);
    if (formula) this.#putFormula(formulaAt, formula);
    const count = check(this.#c.expert_self_tests_for(formula ? formulaAt : 0, testsAt), 'formula refused');
    return new Int32Array(this.#heap.memory.buffer, testsAt, count).slice();
  }

  /** @param {Iterable<number>} tests @param {boolean} again */
  #run(tests, again) {
    for (const test of tests) {
      if (!again && this.#passed.has(test)) continue;
      for (const rows of SELF_TEST_ROWS) this.knownAnswer(test, rows);
      this.#passed.add(test);
    }
  }

  /** The digest of any known answer, for tests: of known formula `number` (-1: silu) in a format. @param {number} number @param {number} type @param {number} numTokens */
  knownDigest(number, type, numTokens) {
    const scratchBytes = this.#c.expert_self_test_scratch_bytes();
    const [digest, scratch] = this.#reserve(32, scratchBytes);
    check(this.#c.expert_known_digest(number, type, numTokens, scratch, scratchBytes, digest), 'no such answer');
    return toHex(this.#bytes(digest, 32));
  }

  /** How many known answers there are. */
  get numKnownAnswers() {
    return this.#c.expert_num_self_tests();
  }

  /** One known answer: the digest. @param {number} index @param {number} numTokens @returns {string} */
  knownAnswer(index, numTokens) {
    const scratchBytes = this.#c.expert_self_test_scratch_bytes();
    const [digest, scratch] = this.#reserve(32, scratchBytes);
    const code = this.#c.expert_self_test(index, numTokens, scratch, scratchBytes, digest);
    const hex = toHex(this.#bytes(digest, 32));
    const what = index < this.#c.expert_num_formats() ? `format ${this.#c.expert_format_type(index)}` : `formula test ${index}`;
    if (code) throw new BuildFault(this.build, `${this.build}, ${what}: ${describe(code)}, digest ${hex}`);
    return hex;
  }

  /** @param {Formula} formula @param {Uint8Array} slice @returns {PackedExpert} */
  pack(formula, slice) {
    return this.packRows(formula, slice, null);
  }

  /** Keep these rows only, for hidden() and finish(); null is all. @param {Formula} formula @param {Uint8Array} slice @param {Rows|null} rows @returns {PackedExpert} */
  packRows(formula, slice, rows) {
    this.prove(formula);
    if (slice.length !== this.sliceBytes(formula)) check(-3, `slice of ${slice.length} bytes refused`);
    let stagingBytes = PIECE_BYTES;
    const [at, atRows] = this.#reserve(FORMULA_BYTES, ROWS_BYTES);
    this.#putFormula(at, formula);
    const size = check(this.#c.expert_part_bytes(at, this.#putRows(atRows, rows)), 'slice refused');
    const address = this.#take(size);
    try {
      for (let offset = 0, length = 0; ; ) {
        const [formulaAt, rowsAt, pieceAt, staging] = this.#reserve(FORMULA_BYTES, ROWS_BYTES, 8, stagingBytes);
        this.#putFormula(formulaAt, formula);
        const part = this.#putRows(rowsAt, rows);
        const piece = new Uint32Array(this.#heap.memory.buffer, pieceAt, 2);
        piece.set([offset, length]);
        check(this.#c.expert_next_piece(formulaAt, part, PIECE_BYTES, pieceAt), 'slice refused');
        if (piece[1] === 0) return new PackedExpert(address, size);
        if (piece[1] > stagingBytes) { // 16 rows may be more than a piece should be
          stagingBytes = piece[1];
          continue;
        }
        [offset, length] = piece;
        this.#bytes(staging, length).set(slice.subarray(offset, offset + length));
        check(this.#c.expert_pack_piece(formulaAt, part, pieceAt, staging, address, size), `slice of ${slice.length} bytes refused`);
      }
    } catch (error) {
      this.#heap.give(address, size);
      throw error;
    }
  }

  /** @param {PackedExpert} expert */
  free(expert) {
    if (expert.sizeBytes === 0) return;
    this.#heap.give(expert.address, expert.sizeBytes);
    expert.sizeBytes = 0;
  }

  /** @param {Call} call */
  answer(call) {
    const sums = this.#compute(call);
    const count = call.numTokens * call.formula.hidden_dim;
    return new BigInt64Array(this.#heap.memory.buffer, sums, count).slice();
  }

  /** @param {Call} call */
  partial(call) {
    const sums = this.#compute(call);
    return this.#encode(sums, call.numTokens, call.formula.hidden_dim, call.grid, sums + call.numTokens * call.formula.hidden_dim * 8);
  }

  /**
   * The first half of a call shared by rows: some units of h for every pick, from experts that hold these rows.
   * @param {Call} call
   * @param {Rows} rows
   * @returns {Float32Array} [picks, end unit - first unit]
   */
  hidden(call, rows) {
    const units = rows[1] - rows[0];
    const count = call.pickExpert.length * units;
    const [callAt, out, rowsAt] = this.#place(call, count * 4, ROWS_BYTES);
    check(this.#c.expert_hidden(callAt, this.#putRows(rowsAt, rows), out, units), 'dispatch refused');
    return new Float32Array(this.#heap.memory.buffer, out, count).slice();
  }

  /**
   * The second half: some channels of the sums, from all of h. x is not read.
   * @param {Call} call
   * @param {Rows} rows
   * @param {Float32Array} h [picks, expert_dim]
   * @returns {BigInt64Array} [rows of x, end channel - first channel]
   */
  finish(call, rows, h) {
    const channels = rows[3] - rows[2];
    const count = call.numTokens * channels;
    const [callAt, out, rowsAt, hAt] = this.#place({ ...call, x: null }, count * 8, ROWS_BYTES, h.byteLength);
    new Float32Array(this.#heap.memory.buffer, hAt).set(h);
    check(this.#c.expert_finish(callAt, this.#putRows(rowsAt, rows), hAt, call.formula.expert_dim, channels), 'dispatch refused');
    return new BigInt64Array(this.#heap.memory.buffer, out, count).slice();
  }

  /** @param {BigInt64Array} sums @param {number} numTokens @param {number} hiddenDim @param {number} grid */
  encodePartial(sums, numTokens, hiddenDim, grid) {
    if (sums.length !== numTokens * hiddenDim) check(-3, 'partial not encoded');
    const [at] = this.#reserve(sums.byteLength + encodedBytes(numTokens, hiddenDim));
    new BigInt64Array(this.#heap.memory.buffer, at, sums.length).set(sums);
    return this.#encode(at, numTokens, hiddenDim, grid, at + sums.byteLength);
  }

  /** Add the partials of several kernels and encode the sum. @param {EncodedPartial[]} partials @param {number} numTokens @param {number} hiddenDim @param {number} grid */
  addPartials(partials, numTokens, hiddenDim, grid) {
    const sumsBytes = numTokens * hiddenDim * 8;
    const most = Math.max(...partials.map(({ data }) => data.length));
    const [sums, widthsAt, dataAt] = this.#reserve(sumsBytes + encodedBytes(numTokens, hiddenDim), numTokens, most);
    this.#bytes(sums, sumsBytes).fill(0);
    for (const { widths, data } of partials) {
      if (widths.length !== numTokens) check(-3, 'partials not added');
      this.#bytes(widthsAt, numTokens).set(widths);
      this.#bytes(dataAt, data.length).set(data);
      check(this.#c.expert_add_partial(widthsAt, dataAt, data.length, numTokens, hiddenDim, grid, sums), 'partials not added');
    }
    return this.#encode(sums, numTokens, hiddenDim, grid, sums + sumsBytes);
  }

  /** @param {Uint8Array} data */
  sha256(data) {
    const [digest, staging] = this.#reserve(32, data.length);
    this.#bytes(staging, data.length).set(data);
    this.#c.expert_sha256(staging, data.length, digest);
    return toHex(this.#bytes(digest, 32));
  }

  /** Read an expert as fast as memory allows, for benchmarks. @param {PackedExpert} expert */
  readMemory(expert) {
    return this.#c.expert_read_memory(expert.address, expert.sizeBytes);
  }

  /** Compute a dispatch; the sums stay in the working space, with room to encode them behind. @param {Call} call @returns {number} their address */
  #compute(call) {
    const { numTokens, formula } = call;
    const [callAt, sums] = this.#place(call, numTokens * formula.hidden_dim * 8 + encodedBytes(numTokens, formula.hidden_dim));
    check(this.#c.expert_answer(callAt), `dispatch of ${numTokens} rows refused`);
    return sums;
  }

  /**
   * Lay a call out in the working space, its results and whatever else is wanted behind it.
   * @param {Omit<Call, 'x'> & {x: Uint8Array|null}} call
   * @param {...number} sizes of the results, where `sums` points, and of what else
   * @returns {number[]} addresses: of the ExpertCall, and of each of the sizes
   */
  #place(call, ...sizes) {
    const { formula, numTokens, x, experts, pickExpert, pickWeight, rowExponents, counts } = call;
    const layer = typeof call.layerExponents === 'number' ? [call.layerExponents] : call.layerExponents;
    const layerSize = call.grid === 1 ? formula.hidden_dim : 1;
    if (rowExponents.length !== numTokens || counts.length !== numTokens) check(-3, `${numTokens} rows`);
    if (pickExpert.length !== pickWeight.length || layer.length !== layerSize) check(-3, `${pickExpert.length} picks`);
    if (experts.some((expert) => expert.sizeBytes === 0)) check(-9, 'dispatch refused');

    const [formulaAt] = this.#reserve(FORMULA_BYTES);
    this.#putFormula(formulaAt, formula);
    const scratchBytes = check(this.#c.expert_scratch_bytes(formulaAt, numTokens, pickExpert.length, experts.length), 'dispatch refused');
    const [at, callAt, xAt, rowsAt, layerAt, countsAt, picksAt, weightsAt, expertsAt, scratch, ...own] = this.#reserve(
      FORMULA_BYTES, CALL_WORDS * 4, x?.length ?? 0, rowExponents.byteLength, layer.length * 4, counts.byteLength, pickExpert.byteLength,
      pickWeight.byteLength, experts.length * 4, scratchBytes, ...sizes,
    );
    this.#putFormula(at, formula); // #reserve may have moved the working space
    const buffer = this.#heap.memory.buffer;
    if (x) new Uint8Array(buffer, xAt).set(x);
    new Int16Array(buffer, rowsAt).set(rowExponents);
    new Int32Array(buffer, layerAt, layer.length).set(layer);
    new Uint16Array(buffer, countsAt).set(counts);
    new Uint16Array(buffer, picksAt).set(pickExpert);
    new Float32Array(buffer, weightsAt).set(pickWeight);
    new Uint32Array(buffer, expertsAt, experts.length).set(experts.map((expert) => expert.address));
    new Uint32Array(buffer, callAt, CALL_WORDS).set([
      at, numTokens, pickExpert.length, experts.length, call.encoding, x ? xAt : 0, x?.length ?? 0, rowsAt, call.grid, layerAt, countsAt,
      picksAt, weightsAt, expertsAt, scratch, scratchBytes, own[0], 0,
    ]);
    return [callAt, ...own];
  }

  /** @param {number} sums @param {number} numTokens @param {number} hiddenDim @param {number} grid @param {number} room @returns {EncodedPartial} */
  #encode(sums, numTokens, hiddenDim, grid, room) {
    const data = room + roundUp(numTokens, 8);
    const size = check(
      this.#c.expert_encode_partial(sums, numTokens, hiddenDim, grid, room, data, encodedBytes(numTokens, hiddenDim) - roundUp(numTokens, 8)),
      'partial not encoded',
    );
    return { widths: this.#bytes(room, numTokens).slice(), data: this.#bytes(data, size).slice() };
  }

  /** Lay pieces out in the working space, each at a multiple of 64; valid until the next call. @param {number[]} sizes @returns {number[]} */
  #reserve(...sizes) {
    const total = sizes.reduce((sum, size) => sum + roundUp(size, 64), 0);
    if (total > this.#work.size) {
      if (this.#work.size) this.#heap.give(this.#work.at, this.#work.size);
      this.#work = { at: 0, size: 0 };
      const size = roundUp(total, 65536);
      this.#work = { at: this.#take(size), size };
    }
    let { at } = this.#work;
    return sizes.map((size) => {
      const here = at;
      at += roundUp(size, 64);
      return here;
    });
  }

  /** @param {number} sizeBytes */
  #take(sizeBytes) {
    const at = this.#heap.take(sizeBytes);
    if (at === null) throw new KernelMemoryFull(sizeBytes, this.usedBytes);
    return at;
  }

  /** @param {number} at @param {number} length */
  #bytes(at, length) {
    return new Uint8Array(this.#heap.memory.buffer, at, length);
  }

  /** @param {number} at */
  #text(at) {
    const bytes = new Uint8Array(this.#heap.memory.buffer, at);
    return String.fromCharCode(...bytes.subarray(0, bytes.indexOf(0)));
  }

  /** Write an ExpertRows; null is all. @param {number} at @param {Rows|null} rows @returns {number} where it is */
  #putRows(at, rows) {
    if (rows === null) return 0;
    new Int32Array(this.#heap.memory.buffer, at, 4).set(rows);
    return at;
  }

  /** Write an ExpertFormula. @param {number} at @param {Formula} formula */
  #putFormula(at, formula) {
    const activation = ACTIVATIONS.indexOf(formula.activation);
    const position = WEIGHT_POSITIONS.indexOf(formula.weight_position);
    if (activation < 0 || position < 0) check(-5, `activation ${formula.activation}`);
    const extras = Number(formula.biased) | (Number(formula.scaled ?? false) << 1); // EXPERT_BIASED, EXPERT_SCALED
    const words = new Int32Array(this.#heap.memory.buffer, at, FORMULA_BYTES / 4);
    words.set([formula.hidden_dim, formula.expert_dim, formula.gate_type ?? -1, formula.up_type, formula.down_type, activation, position, extras]);
    new Float32Array(this.#heap.memory.buffer, at + 32, 2).set([formula.alpha, formula.limit]);
  }
}

/** Room for widths and rows at their widest. @param {number} numTokens @param {number} hiddenDim */
function encodedBytes(numTokens, hiddenDim) {
  return roundUp(numTokens, 8) + numTokens * hiddenDim * 8;
}

/** @param {Uint8Array} bytes */
function toHex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
