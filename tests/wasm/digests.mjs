/** Print the digest of every known answer of a wasm kernel: node digests.mjs KERNEL.wasm; lines as in selftest_main.c. */
import { readFileSync } from 'node:fs';

const { exports: c } = new WebAssembly.Instance(new WebAssembly.Module(readFileSync(process.argv[2])), {});
const digest = c.__heap_base.value, scratch = digest + 64, size = c.expert_self_test_scratch_bytes();
c.memory.grow((size >> 16) + 2);
for (let i = 0; i < c.expert_num_formats(); i++) {
  const type = c.expert_format_type(i);
  for (let formula = -1; c.expert_known_digest(formula, type, 7, scratch, size, digest) === 0; formula++)
    console.log(formula, type, 7, Buffer.from(c.memory.buffer, digest, 32).toString('hex'));
}
