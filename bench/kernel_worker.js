/**
 * One thread of the benchmark of the wasm kernels, in a browser's worker or a thread of node (see kernel_timing.js).
 *
 * In:  {type: 'open', module, foreign} · {type: 'fill', formula, slice, count, group, same} · {type: 'rows', numTokens}
 *      {type: 'read' | 'run', count}
 * Out: {ms} of the task itself, or {error}. `same`: the pool is one expert, again and again
 */
import { WasmKernel } from '../node-web/src/kernels/wasm.js';

const LEAST_MS = 5; // a page's clock goes in steps of 0.1 ms: what is shorter is done again and again

const Q8_0 = 8, Q8_1 = 9, Q8_K = 15;
/** What ggml wants x in: block columns and bytes, by type (ggml-common.h). */
const X_BLOCKS = { [Q8_0]: [32, 34], [Q8_1]: [32, 36], [Q8_K]: [256, 292], 0: [1, 4], 1: [1, 2], 30: [1, 2] };

/** Our kernel: whole experts, as a node is asked for them. */
class Ours {
  constructor(module) {
    this.kernel = WasmKernel.from(module);
  }

  fill({ formula, slice, count, group, same }) {
    this.formula = formula;
    this.group = group;
    new Set(this.pool).forEach((expert) => this.kernel.free(expert));
    const first = this.kernel.pack(formula, slice);
    this.pool = Array.from({ length: count }, (_, i) => (same || i === 0 ? first : this.kernel.pack(formula, slice)));
  }

  rows(numTokens) {
    const { hidden_dim: hiddenDim } = this.formula;
    const values = Float32Array.from({ length: numTokens * hiddenDim }, (_, i) => Math.sin(i * 1.7));
    this.call = {
      formula: this.formula, numTokens, x: new Uint8Array(values.buffer), encoding: 0,
      rowExponents: new Int16Array(numTokens), grid: 0, layerExponents: 20,
      counts: new Uint16Array(numTokens).fill(this.group),
      pickExpert: Uint16Array.from({ length: numTokens * this.group }, (_, i) => i % this.group),
      pickWeight: new Float32Array(numTokens * this.group).fill(1 / this.group),
    };
  }

  read(count) {
    for (let i = 0; i < count; i++) this.kernel.readMemory(this.pool[i]);
  }

  run(count) {
    for (let at = 0; at < count; at += this.group) this.kernel.partial({ ...this.call, experts: this.pool.slice(at, at + this.group) });
  }
}

/** llama.cpp's dot products (llama_cpp_wasm.c): every row of weights times every row of x. */
class Theirs {
  constructor(module) {
    const nothing = () => 0;
    const imports = {};
    for (const { module: from, name } of WebAssembly.Module.imports(module)) (imports[from] ??= {})[name] = nothing;
    this.c = new WebAssembly.Instance(module, imports).exports;
    this.c._initialize?.();
    this.room = 0;
  }

  fill({ formula, slice, count }) {
    this.type = formula.up_type;
    this.cols = formula.hidden_dim;
    const rowBytes = slice.length / (3 * formula.expert_dim);
    const sizeBytes = slice.length * count;
    if (this.room < sizeBytes) {
      this.weights = this.c.take(sizeBytes) >>> 0;
      this.room = sizeBytes;
    }
    for (let i = 0; i < count; i++) new Uint8Array(this.c.memory.buffer, this.weights + i * slice.length, slice.length).set(slice);
    this.rowBytes = rowBytes;
    this.rowsOfExpert = slice.length / rowBytes;
  }

  rows(numTokens) {
    const [block, size] = X_BLOCKS[this.c.x_type(this.type)];
    this.xBytes = (this.cols / block) * size;
    const values = this.c.take(this.cols * 4) >>> 0;
    this.x = this.c.take(this.xBytes * numTokens) >>> 0;
    this.y = this.c.take(numTokens * 4) >>> 0;
    for (let row = 0; row < numTokens; row++) {
      new Float32Array(this.c.memory.buffer, values, this.cols).set(Float32Array.from({ length: this.cols }, (_, i) => Math.sin((row * this.cols + i) * 1.7)));
      this.c.to_x(this.type, values, this.cols, this.x + row * this.xBytes);
    }
    this.numTokens = numTokens;
  }

  read() {}

  run(count) {
    this.c.products(this.type, this.cols, count * this.rowsOfExpert, this.weights, this.rowBytes, this.numTokens, this.x, this.xBytes, this.y);
  }
}

let kernel;
addEventListener('message', ({ data }) => {
  try {
    const started = performance.now();
    let times = 1;
    switch (data.type) {
      case 'open': kernel = new (data.foreign ? Theirs : Ours)(data.module); break;
      case 'fill': kernel.fill(data); break;
      case 'rows': kernel.rows(data.numTokens); break;
      default:
        kernel[data.type](data.count);
        for (; performance.now() - started < LEAST_MS; times++) kernel[data.type](data.count);
    }
    postMessage({ ms: (performance.now() - started) / times });
  } catch (error) {
    postMessage({ error: String(error?.stack ?? error) });
  }
});
