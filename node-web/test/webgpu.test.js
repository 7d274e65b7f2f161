/** What of the graphics kernel needs no graphics device: sizes, refusals, rows, its life with a device that misbehaves. */
import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { test } from 'node:test';

import { CallRefused, KernelFault } from '../src/errors.js';
import { Graphics } from '../src/kernels/webgpu/device.js';
import { FORMATS, refusal, rowBytes, rowsPerPart } from '../src/kernels/webgpu/formats.js';
import { addOnGrid, rowsOfPicks } from '../src/kernels/webgpu/rows.js';
import { Shaders } from '../src/kernels/webgpu/shaders.js';

const FORMULA = {
  hidden_dim: 512, expert_dim: 256, gate_type: 12, up_type: 12, down_type: 14, activation: 'silu', alpha: 0, limit: 0,
  weight_position: 'after', biased: false,
};
const read = (/** @type {string} */ name) => readFile(new URL(`../src/kernels/webgpu/${name}.wgsl`, import.meta.url), 'utf8');

test('what a device cannot hold is named, what stands in parts is not refused', () => {
  assert.equal(refusal(FORMULA), null);
  assert.equal(refusal({ ...FORMULA, hidden_dim: 1 << 16, expert_dim: 1 << 15 }), null); // 1.2 GB a matrix
  assert.match(String(refusal({ ...FORMULA, up_type: 99 })), /format 99/);
  assert.match(String(refusal({ ...FORMULA, activation: 'swish' })), /swish/);
  assert.match(String(refusal(FORMULA, 256)), /one binding holds 256/);
  const rows = rowsPerPart([{ type: 12, cols: 512 }, { type: 8, cols: 512 }], 4096);
  assert.ok(rows * rowBytes(8, 512) + 8 <= 4096 && (rows + 1) * rowBytes(8, 512) + 12 > 4096);
});

test('every format has its shader, and no name is left open in it', async () => {
  const shaders = new Shaders(read, false);
  for (const type of Object.keys(FORMATS).map(Number)) {
    for (const code of [await shaders.down(type), await shaders.hidden(type, type), await shaders.hidden(null, type)]) {
      assert.ok(!code.includes('$'), FORMATS[type].file);
      assert.ok((code.match(/var<storage/g) ?? []).length <= 8, 'storage buffers');
    }
  }
});

test('a shader that could not be fetched is fetched again', async () => {
  let broken = true;
  const shaders = new Shaders((name) => (broken ? Promise.reject(new Error('offline')) : read(name)), false);
  await assert.rejects(shaders.quantise(), /offline/);
  broken = false;
  assert.match(await shaders.quantise(), /@compute/);
});

test('outputs are added on the grid of their row, and what does not fit is refused', () => {
  const call = /** @type {any} */ ({ formula: { hidden_dim: 2 }, grid: 0, layerExponents: 31, rowExponents: Int16Array.of(0, -1), counts: Uint16Array.of(1, 2), pickExpert: new Uint16Array(3), pickWeight: new Float32Array(3) });
  assert.deepEqual([...rowsOfPicks(call)], [0, 1, 1]);
  const sums = new BigInt64Array(4);
  addOnGrid(sums, Float32Array.of(1.5, 2.5, 1, 1, 1, 2), rowsOfPicks(call), call);
  assert.deepEqual([...sums], [2n, 2n, 4n, 6n]); // half to even; the second row has steps of a half
  assert.throws(() => addOnGrid(sums, Float32Array.of(1e30, 0), Uint32Array.of(0), call), { code: 'grid_overflow' });
  assert.throws(() => addOnGrid(sums, Float32Array.of(NaN, 0), Uint32Array.of(0), call), { code: 'non_finite' });
  assert.throws(() => rowsOfPicks({ ...call, counts: Uint16Array.of(1, 1) }), CallRefused);
});

/** A browser with devices made of promises. @param {string} vendor */
function fakeGpu(vendor = 'any') {
  /** @type {{lose: (why: string) => void, destroy: () => void}[]} */
  const devices = [];
  const gpu = {
    asked: /** @type {any[]} */ ([]),
    wgslLanguageFeatures: new Set(['packed_4x8_integer_dot_product']),
    requestAdapter: async () => ({
      info: { vendor },
      requestDevice: async (/** @type {any} */ wanted) => {
        gpu.asked.push(wanted);
        /** @type {(value: any) => void} */
        let lose = () => {};
        const lost = new Promise((resolve) => { lose = resolve; });
        const device = { lost, lose: (/** @type {string} */ message) => lose({ message, reason: 'unknown' }), destroy: () => lose({ message: 'destroyed', reason: 'destroyed' }) };
        devices.push(device);
        return device;
      },
    }),
  };
  return { gpu, devices };
}

test('whoever waits when a device is lost hears of it at once, and another is taken, but not for ever', async () => {
  const { gpu, devices } = fakeGpu();
  /** @type {string[]} */
  const heard = [];
  const graphics = new Graphics(gpu, read, (why) => heard.push(why), 10_000);
  await graphics.open();
  assert.deepEqual(gpu.asked[0], { requiredLimits: {} });
  for (let i = 0; i < 3; i++) {
    const waiting = graphics.inTime(new Promise(() => {}));
    devices[i].lose('pulled out');
    await assert.rejects(waiting, { code: 'not_held', message: /pulled out/ });
    await graphics.ready;
    assert.equal(graphics.device, devices[i + 1]);
  }
  devices[3].lose('once more');
  await new Promise((resolve) => setTimeout(resolve));
  await assert.rejects(graphics.ready, KernelFault);
  assert.equal(heard.length, 4);
});

test('a device that does not answer in time is destroyed; an error of the driver is the kernel’s fault', async () => {
  const { gpu } = fakeGpu();
  const graphics = new Graphics(gpu, read, () => {}, 20);
  await graphics.open();
  await assert.rejects(graphics.inTime(new Promise(() => {})), { code: 'not_held' });
  await graphics.ready;
  await assert.rejects(graphics.inTime(Promise.reject(new Error('map failed'))), KernelFault);
});

test('bytes are multiplied in one instruction only where the hardware has it', async () => {
  for (const [vendor, packed] of /** @type {[string, boolean][]} */ ([['nvidia', true], ['apple', false]])) {
    const graphics = new Graphics(fakeGpu(vendor).gpu, read, () => {}, 1000);
    await graphics.open();
    assert.equal(graphics.shaders.packedDot, packed);
  }
});
