/** Times seals in node and in a browser's worker; bench_seal.py calls it. */

import { decodeFrame, encodeFrame, FrameType } from '../node-web/src/wire/frames.js';
import { Seal } from '../node-web/src/wire/seal.js';

const BATCH = 50;

/** Medians over batches. @param {number[]} sizesKb @param {number} runs */
export async function measure(sizesKb, runs) {
  const rows = [];
  for (const sizeKb of sizesKb) {
    const make = () => Seal.of(new Uint8Array(32).fill(7), new Uint8Array(10));
    const [node, mirror] = [await make(), await make()];
    const backbone = new Seal(mirror.openers, mirror.sealers, mirror.derived);
    const payload = new Uint8Array(sizeKb * 1024);
    const data = encodeFrame({ type: FrameType.DISPATCH, payload, peer: 5, callId: 77n, epoch: 7, deadlineMs: 1000 });
    /** @type {Uint8Array<ArrayBuffer>[]} */
    const closed = [];
    // Browsers round their clock to 0.1 ms: whole rounds are timed, one frame after the other.
    const round = async (/** @type {(run: number) => unknown} */ step) => {
      const times = [];
      for (let at = 0; at < runs; at += BATCH) {
        const began = performance.now();
        for (let run = at; run < at + BATCH; run += 1) await step(run);
        times.push((1000 * (performance.now() - began)) / BATCH);
      }
      return times.sort((one, other) => one - other)[times.length >> 1];
    };
    rows.push({
      size_kb: sizeKb,
      seal_us: await round(async () => closed.push(await backbone.seal(data))),
      open_us: await round((run) => node.open(closed[run])),
      plain_us: await round(() => decodeFrame(encodeFrame({ type: FrameType.DISPATCH, payload, peer: 5, callId: 77n }))),
    });
  }
  return rows;
}
