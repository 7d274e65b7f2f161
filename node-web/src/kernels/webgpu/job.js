/** Experts on a graphics device, and one submission of work for them; mirrors backbone/experts/webgpu_job.py. */

import { PackedExpert } from '../kernel.js';
import { ACTIVATIONS, FORMATS, TILE, usesGrid } from './formats.js';

/** @typedef {import('../kernel.js').Formula} Formula */
/** @typedef {import('./device.js').Device} Device */
/** @typedef {import('./rows.js').Rows} Rows */
/** @typedef {{first: number, rows: number, buffers: any[]}} Part  some rows of gate (unless there is none) and up, or of down */
/** @typedef {{gate?: Rows, up: Rows}} Inputs */

const WIDTH = 65535; // workgroups beside one another
export const USAGE = { MAP_READ: 1, COPY_SRC: 4, COPY_DST: 8, UNIFORM: 64, STORAGE: 128 };

export class DeviceExpert extends PackedExpert {
  /** @param {Device} device @param {Part[]} hidden @param {Part[]} down @param {any} biases @param {Float32Array} scales gate, up, down @param {number} sizeBytes */
  constructor(device, hidden, down, biases, scales, sizeBytes) {
    super(0, sizeBytes);
    this.device = device;
    this.hidden = hidden;
    this.down = down;
    this.biases = biases;
    this.scales = scales;
  }
}

/** A buffer that holds this, and some bytes beyond. @param {Device} device @param {Uint8Array|Uint32Array|Float32Array} data @param {number} usage @param {number} [beyond] */
export function bufferOf(device, data, usage, beyond = 0) {
  const buffer = device.createBuffer({ size: Math.max(16, Math.ceil((data.byteLength + beyond) / 4) * 4), usage, mappedAtCreation: true });
  new Uint8Array(buffer.getMappedRange()).set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  buffer.unmap();
  return buffer;
}

/** One submission: its buffers, which end with it, and its passes. */
export class Job {
  /** @param {Device} device */
  constructor(device) {
    this.device = device;
    this.encoder = device.createCommandEncoder();
    /** @type {any[]} */
    this.buffers = [];
    this.make = (/** @type {Uint8Array|Uint32Array|Float32Array} */ data, usage = USAGE.STORAGE) => {
      this.buffers.push(bufferOf(device, data, usage));
      return this.buffers.at(-1);
    };
  }

  end() {
    for (const buffer of this.buffers) buffer.destroy();
  }

  /** @param {number} size @param {number} usage */
  room(size, usage = USAGE.STORAGE) {
    this.buffers.push(this.device.createBuffer({ size, usage }));
    return this.buffers.at(-1);
  }

  /** @param {any} pipeline @param {any[]} buffers  the uniform at the place of null, nothing at that of undefined @param {ArrayBuffer} params @param {number} groups @param {number} [depth] */
  pass(pipeline, buffers, params, groups, depth = 1) {
    const uniform = this.make(new Uint8Array(params), USAGE.UNIFORM);
    const entries = buffers.flatMap((buffer, binding) => (buffer === undefined ? [] : { binding, resource: { buffer: buffer ?? uniform } }));
    const pass = this.encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, this.device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries }));
    pass.dispatchWorkgroups(Math.min(groups, WIDTH), Math.ceil(groups / WIDTH), depth);
    pass.end();
  }

  /** @param {any[]} stages @param {Formula} formula @param {Inputs} inputs @param {DeviceExpert[]} experts @param {Uint32Array} expertOf @param {Uint32Array} rows @param {Float32Array} pickWeights @param {any} grids the buffer of them, or null @returns {any} what to map */
  submit([hiddenStage, quantiseStage, downStage], formula, { gate, up }, experts, expertOf, rows, pickWeights, grids) {
    const { hidden_dim: d, expert_dim: f } = formula;
    const picks = rows.length;
    const hBlock = FORMATS[formula.down_type].block;
    const hWords = hBlock ? f / hBlock + f / 4 : f;
    const weightBits = new Uint32Array(pickWeights.buffer, pickWeights.byteOffset, picks);
    const picksOf = this.make(Uint32Array.from({ length: 2 * picks }, (_, i) => (i & 1 ? weightBits : rows)[i >> 1]));
    const upX = this.make(up.words);
    const gateX = gate && gate !== up ? this.make(gate.words) : upX;
    const hidden = this.room(picks * f * 4);
    const ints = this.room(picks * hWords * 4);
    const out = this.room(picks * d * 4, USAGE.STORAGE | USAGE.COPY_SRC);
    const bad = this.make(new Uint32Array(1), USAGE.STORAGE | USAGE.COPY_SRC);
    const staging = this.room(picks * d * 4 + 4, USAGE.COPY_DST | USAGE.MAP_READ);
    const extras = (formula.scaled ? 2 : 0) | (formula.biased ? 4 : 0);
    const before = formula.weight_position === 'before';
    const upBiases = gate ? f : 0;
    const words = (/** @type {number} */ block) => [block ? d / block + d / 4 : d, block];
    const needsGrids = (/** @type {(number|null)[]} */ ...types) => (types.some((type) => type !== null && usesGrid(type)) ? grids : undefined);
    const spans = spansOf(expertOf);
    for (const [e, at, n] of spans) {
      const { hidden: parts, biases, scales } = experts[e];
      for (const part of parts) {
        const params = paramsOf(
          [part.rows, part.first, f, d, ...words(FORMATS[formula.up_type].block), ...(gate ? words(FORMATS[/** @type {number} */ (formula.gate_type)].block) : [0, 0]),
            at, n, WIDTH, extras | (before ? 1 : 0), ACTIVATIONS.indexOf(formula.activation), upBiases],
          [scales[1], scales[0], formula.alpha, formula.limit, formula.alpha ? Math.fround(1 / formula.alpha) : 0, formula.limit ? Math.fround(1 / formula.limit) : 0],
        );
        const [gateW, upW] = gate ? part.buffers : [null, part.buffers[0]];
        const gated = gate ? [gateW, gateX] : [undefined, undefined];
        this.pass(hiddenStage, [upW, upX, picksOf, biases, hidden, null, ...gated, needsGrids(formula.up_type, formula.gate_type)], params, part.rows, Math.ceil(n / TILE));
      }
    }
    const blocks = picks * (hBlock ? f / hBlock : 1);
    this.pass(quantiseStage, [hidden, ints, bad, null], Uint32Array.of(f, hBlock, blocks, WIDTH).buffer, blocks);
    for (const [e, at, n] of spans) {
      const { down: parts, biases, scales } = experts[e];
      for (const part of parts) {
        const params = paramsOf([part.rows, part.first, d, f, hWords, hBlock, 0, 0, at, n, WIDTH, extras | (before ? 0 : 8), 0, upBiases + f], [scales[2], 0, 0, 0, 0, 0]);
        this.pass(downStage, [part.buffers[0], ints, picksOf, biases, out, null, undefined, undefined, needsGrids(formula.down_type)], params, part.rows, Math.ceil(n / TILE));
      }
    }
    this.encoder.copyBufferToBuffer(out, 0, staging, 0, picks * d * 4);
    this.encoder.copyBufferToBuffer(bad, 0, staging, picks * d * 4, 4);
    this.device.queue.submit([this.encoder.finish()]);
    return staging;
  }
}

/** The uniform `Params` of head.wgsl. @param {number[]} integers @param {number[]} floats */
function paramsOf(integers, floats) {
  const params = new ArrayBuffer(80);
  new Uint32Array(params).set(integers);
  new Float32Array(params).set(floats, 14);
  return params;
}

/** Runs of equal experts: expert, first pick, number of picks. @param {Uint32Array} expertOf @returns {[number, number, number][]} */
function spansOf(expertOf) {
  /** @type {[number, number, number][]} */
  const spans = [];
  for (let at = 0; at < expertOf.length; ) {
    let n = 1;
    while (expertOf[at + n] === expertOf[at]) n++;
    spans.push([expertOf[at], at, n]);
    at += n;
  }
  return spans;
}
