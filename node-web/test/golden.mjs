/** For another Node.js: meet every golden hash in every build, cold and hot. Prints {version, met: {build: answers}, refused: {build: why}}. */
import { readFileSync } from 'node:fs';
import { BUILDS, KernelBuilds } from '../src/kernels/choose.js';

const ROOT = new URL('../../', import.meta.url);
const golden = [...readFileSync(new URL('wasm/hashes.txt', ROOT), 'utf8').matchAll(/GOLDEN(?:_FORMULA)?\((\d+|\d+, \d+), (\d+), "(\w+)"\)/g)];
const names = [...new Set(golden.map(([, name]) => name))]; // in the order of the kernel's self-tests

const builds = new KernelBuilds(async (build) => new WebAssembly.Module(readFileSync(new URL(`relay/_built/kernel-${build}.wasm`, ROOT))));
await builds.open();
await builds.ready;
/** @type {Record<string, number>} */
const met = {};
for (const build of builds.left()) {
  const kernel = builds.kernel(build);
  for (let round = 0; round < 2; round++) {
    met[build] = golden.filter(([, name, rows, digest]) => kernel.knownAnswer(names.indexOf(name), Number(rows)) === digest).length;
  }
}
console.log(JSON.stringify({ version: process.version, golden: golden.length, met, builds: BUILDS, refused: Object.fromEntries(builds.out) }));
