/**
 * The life of a graphics device: taken, lost, taken anew; nobody waits for it for ever.
 *
 * A device may be lost at any moment: the driver fails, the browser's graphics process dies, it was put to sleep. Then
 * whatever waits fails at once, `onLost` is told, and another device is taken. After MOST_LOSSES there is no other.
 */
import { CallRefused, KernelFault, NodeError, messageOf } from '../../errors.js';
import { usesGrid } from './formats.js';
import { USAGE, bufferOf } from './job.js';
import { Shaders } from './shaders.js';

/** @typedef {any} Device  GPUDevice; TypeScript's own library has no WebGPU yet */

export const DEADLINE_MS = 10_000;
const MOST_LOSSES = 3;
const SAID_MS = 500; // a failing device may say so before it is said to be lost
const PACKED_DOT = 'packed_4x8_integer_dot_product';
const IMITATES_DOT = new Set(['apple']); // Metal has no such instruction; extracting bytes is faster there

export class Graphics {
  /**
   * @param {any} gpu  navigator.gpu
   * @param {import('./shaders.js').Read} read
   * @param {(why: string) => void} onLost
   * @param {number} deadlineMs
   */
  constructor(gpu, read, onLost, deadlineMs) {
    this.gpu = gpu;
    this.read = read;
    this.onLost = onLost;
    this.deadlineMs = deadlineMs;
    this.losses = 0;
    this.closed = false;
    this.alive = false;
    /** @type {Map<string, Promise<any>>} */
    this.pipelines = new Map();
    /** @type {Device} */
    this.device = null;
    this.shaders = new Shaders(read, false);
    /** @type {any} */
    this.gridsBuffer = null;
    /** @type {Promise<never>} */
    this.gone = new Promise(() => {});
    /** @type {Promise<void>} */
    this.ready = Promise.resolve();
  }

  /** Take a device. Throws KernelFault. */
  async open() {
    const adapter = await this.#soon(this.gpu?.requestAdapter({ powerPreference: 'high-performance' }) ?? null);
    if (!adapter) throw new KernelFault('this browser offers no graphics device');
    const device = await this.#soon(adapter.requestDevice({ requiredLimits: {} })); // the limits every device has
    if (this.closed) return device.destroy();
    this.device = device;
    this.alive = true;
    this.gridsBuffer = null;
    this.pipelines.clear();
    const packed = this.gpu.wgslLanguageFeatures?.has(PACKED_DOT) && !IMITATES_DOT.has(adapter.info?.vendor);
    this.shaders = new Shaders(this.read, Boolean(packed));
    this.gone = device.lost.then((/** @type {any} */ { message, reason }) => {
      throw new CallRefused('not_held', `the graphics device was lost: ${message || reason}`);
    });
    this.gone.catch((error) => this.#lost(device, messageOf(error)));
  }

  /** @param {Device} device @param {string} why */
  #lost(device, why) {
    if (this.closed || device !== this.device) return;
    this.losses += 1;
    this.alive = false;
    this.ready = this.losses > MOST_LOSSES ? Promise.reject(new KernelFault(why)) : this.open();
    this.ready.catch(() => {}); // whoever asks next hears of it
    this.onLost(why);
  }

  /** A browser that does not even say whether it has a device has none. @template T @param {Promise<T>} promise @returns {Promise<T>} */
  async #soon(promise) {
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(new KernelFault('the browser gave no graphics device in time')), DEADLINE_MS);
    });
    try {
      return /** @type {T} */ (await Promise.race([promise, late]));
    } finally {
      clearTimeout(timer);
    }
  }

  /** Wait for the device, but not for ever, and not for one that is gone. @template T @param {Promise<T>} promise @returns {Promise<T>} */
  async inTime(promise) {
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    let timer;
    const { device, gone } = this;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => {
        device.destroy(); // its `lost` tells everybody
        reject(new CallRefused('not_held', `the graphics device gave no answer within ${this.deadlineMs} ms`));
      }, this.deadlineMs);
    });
    promise.catch(() => {}); // when it loses the race
    try {
      return /** @type {T} */ (await Promise.race([promise, gone, late]));
    } catch (error) {
      clearTimeout(timer);
      if (error instanceof NodeError) throw error;
      await Promise.race([gone, new Promise((resolve) => setTimeout(resolve, SAID_MS))]);
      throw new KernelFault(messageOf(error));
    } finally {
      clearTimeout(timer);
    }
  }

  /** The grids of the IQ formats on the device, brought when a formula first needs them. @param {import('../kernel.js').Formula} formula @returns {Promise<any>} null: it needs none */
  async grids({ gate_type: gate, up_type: up, down_type: down }) {
    if (![gate, up, down].some((type) => type !== null && usesGrid(type))) return null;
    const { GRIDS } = await import('./grids.js');
    this.gridsBuffer ??= bufferOf(this.device, Uint8Array.from(atob(GRIDS), (letter) => letter.charCodeAt(0)), USAGE.STORAGE);
    return this.gridsBuffer;
  }

  /** @param {'hidden'|'quantise'|'down'} stage @param {(number|null)[]} types  gate, up | none | down @returns {Promise<any>} */
  pipeline(stage, ...types) {
    const key = [stage, ...types].join(' ');
    let found = this.pipelines.get(key);
    if (found === undefined) {
      found = this.#build(stage, types);
      this.pipelines.set(key, found);
      found.catch(() => this.pipelines.delete(key));
    }
    return found;
  }

  /** @param {'hidden'|'quantise'|'down'} stage @param {(number|null)[]} types */
  async #build(stage, types) {
    const { device, shaders } = this;
    const [first, second] = types;
    const code = stage === 'quantise' ? await shaders.quantise()
      : stage === 'down' ? await shaders.down(/** @type {number} */ (first))
      : await shaders.hidden(first, /** @type {number} */ (second));
    const module = device.createShaderModule({ code });
    return device.createComputePipelineAsync({ layout: 'auto', compute: { module, entryPoint: 'main' } });
  }

  close() {
    this.closed = true;
    this.device?.destroy();
  }
}
