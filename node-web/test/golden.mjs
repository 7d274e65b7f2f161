/** For another Node.js: every golden hash, and every formula in every format, in every build, cold and hot. Prints how many were met by each. */
import { readFileSync } from 'node:fs';
import { BUILDS, KernelBuilds } from '../src/kernels/choose.js';

const ROOT = new URL('../../', import.meta.url);
const golden = [...readFileSync(new URL('wasm/hashes.txt', ROOT), 'utf8').matchAll(/GOLDEN(?:_FORMULA)?\((\d+|\d+, \d+), (\d+), "(\w+)"\)/g)];
const names = [...new Set(golden.map(([, name]) => name))]; // in the order of the kernel's self-tests

const digests = readFileSync(new URL('tests/vectors/kernel_digests.txt', ROOT), 'utf8').trim().split('\n').map((line) => line.split(' '));

const builds = new KernelBuilds(async (build) => new WebAssembly.Module(readFileSync(new URL(`relay/_built/kernel-${build}.wasm`, ROOT))));
await builds.open();
await builds.all();
/** @type {Record<string, number>} */
const met = {};
for (const build of builds.left()) {
  const kernel = builds.kernel(build);
  for (let round = 0; round < 2; round++) {
    met[build] = golden.filter(([, name, rows, digest]) => kernel.knownAnswer(names.indexOf(name), Number(rows)) === digest).length;
    met[build] += digests.filter(([number, type, rows, digest]) => kernel.knownDigest(Number(number), Number(type), Number(rows)) === digest).length;
  }
}
console.log(JSON.stringify({ version: process.version, golden: golden.length + digests.length, met, builds: BUILDS, refused: Object.fromEntries(builds.out) }));
