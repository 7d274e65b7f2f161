/** Time the wasm kernel; bench_kernel.py starts this, passes the shapes as JSON and prints the table. */
import { readFileSync } from 'node:fs';
import { WasmKernel } from '../node-web/src/kernels/wasm.js';

const shape = JSON.parse(process.argv[2]);
const wasm = readFileSync(shape.kernel);

function bestS(call) {
  call();
  let best = Infinity;
  const end = performance.now() + 1000 * shape.seconds;
  while (performance.now() < end) {
    const started = performance.now();
    call();
    best = Math.min(best, (performance.now() - started) / 1000);
  }
  return best;
}

const found = [];
for (const type of shape.types) {
  const kernel = await WasmKernel.load(wasm);
  const formula = {
    hidden_dim: shape.hidden_dim, expert_dim: shape.expert_dim, gate_type: type, up_type: type, down_type: type,
    activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
  };
  const slice = new Uint8Array(readFileSync(`${shape.folder}/${type}`));
  const count = Math.floor(shape.pool_bytes / slice.length / shape.experts_a_call) * shape.experts_a_call;
  const pool = Array.from({ length: count }, (_, i) => kernel.pack(formula, slice));
  const readS = bestS(() => pool.forEach((expert) => kernel.readMemory(expert)));
  for (const numTokens of shape.rows) {
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
    found.push({ build: kernel.build, ggml_type: type, rows: numTokens, size_bytes: count * slice.length, spent_s: spent, read_s: readS });
  }
}
console.log(JSON.stringify(found));
