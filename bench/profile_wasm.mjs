/** Compute one expert of a format for a second, so that V8 compiles the kernel in its last tier; profile_wasm.py reads the code that it prints. */
import { readFileSync } from 'node:fs';
import { WasmKernel } from '../node-web/src/kernels/wasm.js';

const [path, slicePath, type, rows] = process.argv.slice(2);
const [hiddenDim, expertDim, numTokens] = [512, 256, Number(rows)];
const formula = {
  hidden_dim: hiddenDim, expert_dim: expertDim, gate_type: Number(type), up_type: Number(type), down_type: Number(type),
  activation: 'silu', alpha: 0, limit: 0, weight_position: 'after', biased: false,
};
const kernel = await WasmKernel.load(readFileSync(path));
const experts = [kernel.pack(formula, new Uint8Array(readFileSync(slicePath)))];
const x = Float32Array.from({ length: hiddenDim * numTokens }, (_, i) => Math.sin(i * 1.7));
const call = {
  formula, numTokens, x: new Uint8Array(x.buffer), encoding: 0, rowExponents: new Int16Array(numTokens), grid: 0, layerExponents: 20,
  counts: new Uint16Array(numTokens).fill(1), experts, pickExpert: new Uint16Array(numTokens), pickWeight: new Float32Array(numTokens).fill(1),
};
for (const end = performance.now() + 1000; performance.now() < end; ) kernel.partial(call);
