/** Time the wasm kernel; bench_kernel.py starts this, passes the shapes as JSON and prints the table. */
import { readFileSync } from 'node:fs';
import { WasmKernel } from '../node-web/src/kernels/wasm.js';

const shape = JSON.parse(process.argv[2]);
const wasm = readFileSync(new URL('../relay/_built/kernel-plain.wasm', import.meta.url));

/** Xorshift: the weights only have to be random and finite. */
function randomSlice(entry, seed) {
  const blocks = (shape.hidden_dim * shape.expert_dim * 3) / entry.block;
  const bytes = new Uint8Array(blocks * entry.block_bytes);
  let state = seed + 1;
  const words = new Uint32Array(bytes.buffer, 0, bytes.length >> 2);
  for (let i = 0; i < words.length; i++) {
    state ^= state << 13; state ^= state >>> 17; state ^= state << 5;
    words[i] = state;
  }
  if (entry.type === 0) new Float32Array(bytes.buffer).forEach((_, i, all) => { all[i] = ((words[i] >> 8) / 2 ** 28); });
  if (entry.type === 1) new Uint16Array(bytes.buffer).forEach((half, i, all) => { all[i] = (half & 0x8fff) | 0x2000; });
  for (let block = 0; block < blocks; block++) for (const at of entry.scales) bytes.set([0x00, 0x14], block * entry.block_bytes + at);
  return bytes;
}

function bestS(call) {
  call();
  let best = Infinity;
  const end = performance.now() + 600;
  while (performance.now() < end) {
    const started = performance.now();
    call();
    best = Math.min(best, (performance.now() - started) / 1000);
  }
  return best;
}

const found = [];
for (const entry of shape.types) {
  const kernel = await WasmKernel.load(wasm);
  const formula = {
    hidden_dim: shape.hidden_dim, expert_dim: shape.expert_dim, gate_type: entry.type, up_type: entry.type, down_type: entry.type,
    activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
  };
  const slices = [0, 1, 2, 3].map((seed) => randomSlice(entry, seed));
  const count = Math.floor(shape.pool_bytes / slices[0].length / shape.experts_a_call) * shape.experts_a_call;
  const pool = Array.from({ length: count }, (_, i) => kernel.pack(formula, slices[i % 4]));
  const readS = bestS(() => pool.forEach((expert) => kernel.readMemory(expert)));
  for (const numTokens of [1, 4]) {
    const values = Float32Array.from({ length: numTokens * shape.hidden_dim }, (_, i) => Math.sin(i * 1.7));
    const call = {
      formula, numTokens, x: new Uint8Array(values.buffer), encoding: 0,
      rowExponents: new Int16Array(numTokens), grid: 0, layerExponents: 20,
      counts: new Uint16Array(numTokens).fill(shape.experts_a_call),
      pickExpert: Uint16Array.from({ length: numTokens * shape.experts_a_call }, (_, i) => i % shape.experts_a_call),
      pickWeight: new Float32Array(numTokens * shape.experts_a_call).fill(1 / shape.experts_a_call),
    };
    const spent = bestS(() => {
      for (let first = 0; first < count; first += shape.experts_a_call) kernel.answer({ ...call, experts: pool.slice(first, first + shape.experts_a_call) });
    });
    found.push({ build: kernel.build, ggml_type: entry.type, num_tokens: numTokens, size_bytes: count * slices[0].length, spent_s: spent, read_s: readS });
  }
}
console.log(JSON.stringify(found));
