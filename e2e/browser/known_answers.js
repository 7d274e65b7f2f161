/** In a browser's worker: every known answer of one build, cold, hot, and in another instance; every formula in every format. Out: digests. */
import { WasmKernel } from '/src/kernels/wasm.js';

addEventListener('message', async ({ data: { build, tests, formulas } }) => {
  try {
    const module = await WebAssembly.compileStreaming(fetch(`/kernels/kernel-${build}.wasm`));
    const kernel = WasmKernel.from(module);
    const rounds = [0, 1, 2].map(() => tests.map(([test, rows]) => kernel.knownAnswer(test, rows)));
    const fresh = WasmKernel.from(module);
    rounds.push(tests.map(([test, rows]) => fresh.knownAnswer(test, rows)));
    const digests = formulas.map((asked) => fresh.knownDigest(...asked));
    postMessage({ build: kernel.build, rounds, digests, isolated: crossOriginIsolated });
  } catch (error) {
    postMessage({ error: String(error) });
  }
});
