/** Put the WGSL of each stage together from its files; mirrors `Shaders` of backbone/experts/webgpu_device.py. */

import { FORMATS, usesGrid } from './formats.js';

/** @typedef {(name: string) => Promise<string>} Read  gives the text of `<name>.wgsl` of this folder */

export class Shaders {
  /** @param {Read} read @param {boolean} packedDot */
  constructor(read, packedDot) {
    this.read = read;
    this.packedDot = packedDot;
    /** @type {Map<string, Promise<string>>} */
    this.texts = new Map();
  }

  /** @param {string} name */
  #text(name) {
    let text = this.texts.get(name);
    if (text === undefined) {
      text = this.read(name);
      text.catch(() => this.texts.delete(name)); // the network may be back next time
      this.texts.set(name, text);
    }
    return text;
  }

  /** The code that multiplies with a matrix; `$` in the files is its name. @param {number} type @param {string} name */
  async #matrix(type, name) {
    const parts = await Promise.all([`formats/${FORMATS[type].file}`, FORMATS[type].block ? 'ints' : 'floats'].map((part) => this.#text(part)));
    return parts.join('\n').replaceAll('$', name);
  }

  /** @param {...(string|Promise<string>)} parts */
  async #join(...parts) {
    return (await Promise.all(parts)).join('\n');
  }

  /** @param {number|null} gate @param {number} up */
  hidden(gate, up) {
    const sides = gate === null ? [this.#text('ungated')] : [this.#matrix(gate, 'gate_'), this.#text('gated')];
    return this.#join(this.#head(up, gate ?? up), this.#matrix(up, 'up_'), ...sides, this.#text('activations'), this.#text('hidden'));
  }

  /** @param {number} type */
  down(type) {
    return this.#join(this.#head(type), this.#matrix(type, 'down_'), this.#text('down'));
  }

  quantise() {
    return this.#text('quantise');
  }

  /** @param {...number} types of the matrices that follow */
  #head(...types) {
    const parts = ['head', this.packedDot ? 'dot_packed' : 'dot_plain', ...(types.some(usesGrid) ? ['grids'] : [])];
    return this.#join(...parts.map((part) => this.#text(part)));
  }
}
