/** The wasm kernel against the answers of the NumPy reference (tests/vectors/kernel.json, wasm/hashes.txt). */
import assert from 'node:assert/strict';
import { existsSync, readFileSync } from 'node:fs';
import { createHash } from 'node:crypto';
import { before, test } from 'node:test';
import { CallRefused } from '../src/errors.js';
import { Heap } from '../src/kernels/heap.js';
import { KernelMemoryFull } from '../src/kernels/kernel.js';
import { WasmKernel } from '../src/kernels/wasm.js';
import { encodeX, XEncoding } from '../src/wire/tensors.js';

const ROOT = new URL('../../', import.meta.url);
const VECTORS = JSON.parse(readFileSync(new URL('tests/vectors/kernel.json', ROOT), 'utf8'));
const GOLDEN = [...readFileSync(new URL('wasm/hashes.txt', ROOT), 'utf8').matchAll(/GOLDEN(?:_FORMULA)?\((\d+|\d+, \d+), (\d+), "(\w+)"\)/g)];
const WASM = new URL('relay/_built/kernel-plain.wasm', ROOT);
assert.ok(existsSync(WASM), 'run `python wasm/build.py` first');

/** @param {string} text */
const bytes = (text) => new Uint8Array(Buffer.from(text, 'hex'));
/** @param {string} text */
const floats = (text) => new Float32Array(bytes(text).buffer);

/** @type {WasmKernel} */
let kernel;
before(async () => {
  kernel = await WasmKernel.load(readFileSync(WASM));
});

/** @param {any} vector @param {Partial<import('../src/kernels/kernel.js').Call>} [changes] @param {WasmKernel} [on] @returns {import('../src/kernels/kernel.js').Call} */
function callOf(vector, changes = {}, on = kernel) {
  return {
    formula: vector.formula,
    numTokens: vector.counts.length,
    x: bytes(vector.x),
    encoding: 0,
    rowExponents: Int16Array.from(vector.row_exponents),
    grid: 0,
    layerExponents: vector.x32,
    counts: Uint16Array.from(vector.counts),
    experts: vector.slices.map((/** @type {string} */ slice) => on.pack(vector.formula, bytes(slice))),
    pickExpert: Uint16Array.from(vector.picks),
    pickWeight: floats(vector.weights),
    ...changes,
  };
}

/** @param {string} code */
const refusedAs = (code) => (/** @type {unknown} */ error) => error instanceof CallRefused && error.code === code;

test('the known-answer test before all others, cold and warm, takes a moment', () => {
  for (let run = 0; run < 3; run++) {
    const started = performance.now();
    kernel.knownAnswerTest();
    assert.ok(performance.now() - started < 1000, 'some 10 ms; more on a busy machine');
  }
});

test('every golden hash is met', () => {
  const tests = [...new Set(GOLDEN.map(([, name]) => name))]; // in the order of the kernel's self-tests
  assert.ok(tests.includes('8') && tests.includes('7, 8'));
  for (const [, name, rows, digest] of GOLDEN) assert.equal(kernel.knownAnswer(tests.indexOf(name), Number(rows)), digest, name);
});

for (const vector of VECTORS.dispatches) {
  const { up_type: type, gate_type: gate, activation } = vector.formula;
  const name = `${activation}${gate === null ? ' without a gate' : ''}, format ${type}`;
  test(`${name}: f32 rows on the x32 grid give the reference's sums`, () => {
    assert.deepEqual(Array.from(kernel.answer(callOf(vector)), String), vector.sums_x32);
  });
  test(`${name}: encoded rows on the x16 grid give the reference's sums, whole and as a partial`, () => {
    const call = callOf(vector, { x: bytes(vector.encoded_x), encoding: vector.encoding, grid: 1, layerExponents: vector.x16 });
    const sums = kernel.answer(call);
    assert.deepEqual(Array.from(sums, String), vector.sums_x16);
    assert.deepEqual(kernel.partial(call), kernel.encodePartial(sums, call.numTokens, vector.formula.hidden_dim, 1));
  });
}

test('partials are narrowed as the relay expects', () => {
  for (const vector of VECTORS.partials) {
    const sums = BigInt64Array.from(vector.sums.flat().map(BigInt));
    const { widths, data } = kernel.encodePartial(sums, vector.sums.length, vector.sums[0].length, vector.grid);
    assert.deepEqual(Array.from(widths), vector.widths);
    assert.deepEqual(data, bytes(vector.data));
  }
});

test('partials are as near to f64 as their grid allows: x32 to f32 itself, x16 to 15 bits of the channel; what is larger travels wide', (t) => {
  const [d, f, rows, topK] = [64, 32, 6, 2];
  const formula = {
    hidden_dim: d, expert_dim: f, gate_type: null, up_type: 0, down_type: 0,
    activation: 'relu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
  };
  let seed = 7;
  const random = () => (((seed = (seed * 1664525 + 1013904223) >>> 0) / 2 ** 32) * 2 - 1);
  const weights = [0, 1, 2].map(() => Float32Array.from({ length: 2 * d * f }, (_, i) => (random() * (1 + (i % 5))) / 8));
  const x = Float32Array.from({ length: rows * d }, random);
  const pickExpert = Uint16Array.from({ length: rows * topK }, (_, i) => (i * 2) % 3);
  const pickWeight = Float32Array.from({ length: rows * topK }, () => Math.abs(random()));
  const wanted = new Float64Array(rows * d); // every product in f64
  for (let pick = 0; pick < rows * topK; pick++) {
    const row = Math.floor(pick / topK);
    const w = weights[pickExpert[pick]];
    const h = Float64Array.from({ length: f }, (_, j) => Math.max(0, x.subarray(row * d, (row + 1) * d).reduce((sum, v, c) => sum + w[j * d + c] * v, 0)));
    for (let c = 0; c < d; c++) wanted[row * d + c] += pickWeight[pick] * h.reduce((sum, v, j) => sum + w[d * f + c * f + j] * v, 0);
  }
  const most = Array.from({ length: d }, (_, c) => Math.max(...Array.from({ length: rows }, (_, row) => Math.abs(wanted[row * d + c]))));
  const exponents = most.map((value) => Math.ceil(Math.log2(value)));
  const layer = Math.max(...exponents);
  const call = {
    formula, numTokens: rows, x: new Uint8Array(x.buffer), encoding: 0, rowExponents: new Int16Array(rows), counts: new Uint16Array(rows).fill(topK),
    experts: weights.map((w) => kernel.pack(formula, new Uint8Array(w.buffer))), pickExpert, pickWeight,
  };
  const grids = [
    { name: 'x32', grid: 0, layerExponents: layer, step: () => 2 ** (layer - 31), width: 4 },
    { name: 'x16', grid: 1, layerExponents: exponents, step: (/** @type {number} */ c) => 2 ** (exponents[c] - 15), width: 2 },
    { name: 'x16, outgrown', grid: 1, layerExponents: exponents.map((e) => e - 6), step: (/** @type {number} */ c) => 2 ** (exponents[c] - 21), width: 4 },
  ];
  for (const { name, grid, layerExponents, step, width } of grids) {
    const sums = kernel.answer({ ...call, grid, layerExponents });
    const { widths, data } = kernel.partial({ ...call, grid, layerExponents });
    assert.ok(Math.max(...widths) === width, `${name}: widths ${widths}`);
    let worst = 0;
    let at = 0;
    for (let row = 0; row < rows; row++) {
      const values = widths[row] === 2 ? new Int16Array(data.buffer, at, d) : new Int32Array(data.buffer, at, d);
      at += Math.ceil((widths[row] * d) / 8) * 8;
      for (let c = 0; c < d; c++) {
        assert.equal(BigInt(values[c]), sums[row * d + c], 'whatever the width, the sum is the same');
        const error = Math.abs(values[c] * step(c) - wanted[row * d + c]);
        assert.ok(error <= (topK / 2) * step(c) + 2 ** -20 * most[c], `${name}: ${error} at row ${row}, channel ${c}`);
        worst = Math.max(worst, error / most[c]);
      }
    }
    assert.equal(at, data.length);
    t.diagnostic(`${name}: at most ${worst.toExponential(1)} of the largest value of a channel from f64`);
    if (name === 'x32') assert.ok(worst < 1e-6);
    if (name === 'x16') assert.ok(worst > 1e-6 && worst < 2 ** -13);
  }
});

test('sha256 is that of node', () => {
  for (const length of [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000, 100_003]) {
    const data = Uint8Array.from({ length }, (_, i) => (i * 31) & 255);
    assert.equal(kernel.sha256(data), createHash('sha256').update(data).digest('hex'));
  }
});

test('wrong calls are refused by name', () => {
  const vector = VECTORS.dispatches[2];
  const call = callOf(vector);
  assert.throws(() => kernel.answer({ ...call, x: call.x.subarray(1) }), refusedAs('bad_frame'));
  assert.throws(() => kernel.answer({ ...call, pickExpert: call.pickExpert.map(() => 3) }), refusedAs('bad_frame'));
  assert.throws(() => kernel.answer({ ...call, pickWeight: call.pickWeight.map(() => NaN) }), refusedAs('non_finite'));
  assert.throws(() => kernel.answer({ ...call, layerExponents: -100 }), refusedAs('grid_overflow'));
  assert.throws(() => kernel.answer({ ...call, grid: 1 }), refusedAs('bad_frame'));
  assert.throws(() => kernel.answer({ ...call, encoding: 9 }), refusedAs('bad_frame'));
  const blocks = { ...call, encoding: XEncoding.Q8A32, x: encodeX(floats(vector.x), vector.formula.hidden_dim, XEncoding.Q8A32) };
  assert.deepEqual(kernel.answer(blocks), kernel.answer(call));
  new DataView(blocks.x.buffer).setFloat32(0, -1e-45, true);
  assert.throws(() => kernel.answer(blocks), refusedAs('bad_frame'), 'a scale below 0');
  assert.throws(() => kernel.pack(vector.formula, bytes(vector.slices[0]).subarray(1)), refusedAs('bad_frame'));
  assert.throws(() => kernel.pack({ ...vector.formula, activation: 'gelu', limit: 7 }, bytes(vector.slices[0])), refusedAs('bad_frame'));
  const slice = bytes(vector.slices[0]);
  slice.set([0, 0x7c], 0);
  assert.throws(() => kernel.pack(vector.formula, slice), refusedAs('non_finite'));
  kernel.free(call.experts[0]);
  assert.throws(() => kernel.answer(call), refusedAs('bad_frame'));
});

test('answers stay right while the memory grows under them, and freed slices are reused', async () => {
  const fresh = await WasmKernel.load(readFileSync(WASM));
  const vector = VECTORS.dispatches[2];
  const call = callOf(vector, {}, fresh);
  const held = [];
  for (let round = 0; round < 300; round++) held.push(fresh.pack(vector.formula, bytes(vector.slices[round % 3])));
  assert.deepEqual(Array.from(fresh.answer(call), String), vector.sums_x32);
  const used = fresh.usedBytes;
  for (let round = 0; round < 100; round++) {
    fresh.free(held[round]);
    held[round] = fresh.pack(vector.formula, bytes(vector.slices[0]));
  }
  assert.equal(fresh.usedBytes, used);
  assert.deepEqual(Array.from(fresh.answer(call), String), vector.sums_x32);
});

test('a kernel with a limit says when it is full, and goes on', async () => {
  const small = await WasmKernel.load(readFileSync(WASM), { limitBytes: 4 << 20 });
  const vector = VECTORS.dispatches[2];
  const call = callOf(vector, {}, small);
  assert.throws(() => { for (;;) small.pack(vector.formula, bytes(vector.slices[0])); }, KernelMemoryFull);
  assert.deepEqual(Array.from(small.answer(call), String), vector.sums_x32);
});

test('the heap joins neighbours and never hands out a byte twice', () => {
  const heap = new Heap(new WebAssembly.Memory({ initial: 1 }), 1000, 65536 * 40);
  /** @type {Map<number, number>} */
  const taken = new Map();
  let seed = 7;
  const random = (/** @type {number} */ n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
  for (let step = 0; step < 3000; step++) {
    if (random(3) > 0 || taken.size === 0) {
      const size = 1 + random(5000);
      const at = heap.take(size);
      if (at === null) continue;
      assert.equal(at % 64, 0);
      for (const [other, otherSize] of taken) assert.ok(at + size <= other || other + otherSize <= at);
      taken.set(at, size);
    } else {
      const [at, size] = [...taken][random(taken.size)];
      taken.delete(at);
      heap.give(at, size);
    }
  }
  for (const [at, size] of taken) heap.give(at, size);
  assert.equal(heap.usedBytes, 0);
  assert.equal(heap.free.length, 1);
});
