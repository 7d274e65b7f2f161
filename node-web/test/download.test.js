/** Downloads of the page: resumed where they broke off, checked as a whole, kept for the next visit. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Downloads } from '../src/download.js';
import { SliceFault } from '../src/errors.js';
import { Keeper } from '../src/store.js';
import { FakeStore, sha256 } from './fakes.js';

const DATA = Uint8Array.from({ length: 1000 }, (_, i) => i % 251);
const NAME = sha256(DATA);

/**
 * A relay that serves ranges over a line that breaks after so many bytes.
 * @param {number} breaksAfter
 * @param {Uint8Array} [data]
 */
function line(breaksAfter, data = DATA) {
  /** @type {number[]} */
  const asked = [];
  /** @param {string} _slice @param {AbortSignal} _signal @param {number} from */
  const fetchSlice = async (_slice, _signal, from) => {
    asked.push(from);
    const body = new ReadableStream({
      pull(controller) {
        controller.enqueue(data.slice(from, from + breaksAfter));
        if (from + breaksAfter >= data.length) controller.close();
        else controller.error(new TypeError('network error'));
      },
    }, { highWaterMark: 0 });
    /** @type {Record<string, string>} */
    const headers = from ? { 'content-range': `bytes ${from}-${data.length - 1}/${data.length}` } : {};
    return new Response(body, { status: from ? 206 : 200, headers });
  };
  return { asked, fetchSlice };
}

/** @param {FakeStore} store @param {ReturnType<typeof line>['fetchSlice']} fetchSlice */
async function downloads(store, fetchSlice) {
  const keeper = new Keeper(store, 10_000, 100);
  await keeper.open();
  return new Downloads(fetchSlice, keeper, async (data) => sha256(data), () => true);
}

/** The error of a download, or null when it came. @param {Downloads} from */
const failure = (from) => from.get(NAME, DATA.length, new AbortController()).then(() => null, (/** @type {any} */ error) => error);

test('a line that breaks every 300 bytes brings the slice, and no byte twice', async () => {
  const { asked, fetchSlice } = line(300);
  const made = await downloads(new FakeStore(), async (slice, signal, from) => {
    const response = await fetchSlice(slice, signal, from);
    const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
    const pieces = [(await reader.read()).value];
    const body = new ReadableStream({ // the piece arrives before the break does
      start: (controller) => controller.enqueue(pieces[0]),
      pull: async (controller) => {
        try {
          await reader.read();
          controller.close();
        } catch (error) {
          controller.error(error);
        }
      },
    }, { highWaterMark: 0 });
    return new Response(body, { status: response.status, headers: response.headers });
  });
  for (const kept of [300, 600, 900]) {
    assert.equal((await failure(made)).message, 'network error');
    assert.equal(made.keptOf(NAME), kept);
  }
  assert.deepEqual(await made.get(NAME, DATA.length, new AbortController()), DATA);
  assert.deepEqual([asked, made.bytesIn, made.keptOf(NAME)], [[0, 300, 600, 900], 1000, 0]);
});

test('the next visit goes on where this one stopped, and offers no half slices', async () => {
  const store = new FakeStore();
  await store.write(`${NAME}.part`, DATA.subarray(0, 400));
  const { asked, fetchSlice } = line(10_000);
  const made = await downloads(store, fetchSlice);
  assert.deepEqual(made.keeper.inventory(), []);
  assert.deepEqual(await made.get(NAME, DATA.length, new AbortController()), DATA);
  assert.deepEqual([asked, store.slices.size], [[400], 0]);
});

test('kept bytes that were wrong cost one download from the beginning', async () => {
  const store = new FakeStore();
  await store.write(`${NAME}.part`, new Uint8Array(400));
  const { asked, fetchSlice } = line(10_000);
  const made = await downloads(store, fetchSlice);
  assert.deepEqual(await made.get(NAME, DATA.length, new AbortController()), DATA);
  assert.deepEqual(asked, [400, 0]);
});

test('bytes that are wrong from the beginning are a fault of their own kind, and not kept', async () => {
  const { asked, fetchSlice } = line(10_000, new Uint8Array(1000));
  const made = await downloads(new FakeStore(), fetchSlice);
  const error = await failure(made);
  assert.ok(error instanceof SliceFault && error.kind === 'bytes');
  assert.deepEqual([asked, made.keptOf(NAME)], [[0], 0]);
});

test('a relay that answers with the whole, or with another range, starts it over', async () => {
  const store = new FakeStore();
  await store.write(`${NAME}.part`, DATA.subarray(0, 400));
  const whole = await downloads(store, async () => new Response(DATA));
  assert.deepEqual(await whole.get(NAME, DATA.length, new AbortController()), DATA);
  const odd = await downloads(new FakeStore(), async () => new Response(DATA, { status: 206, headers: { 'content-range': 'bytes 7-999/1000' } }));
  assert.match((await failure(odd)).message, /status 206/);
  assert.equal(odd.keptOf(NAME), 0);
});

test('a refusal keeps what came before, and is read no further than it is shown', async () => {
  const store = new FakeStore();
  await store.write(`${NAME}.part`, DATA.subarray(0, 400));
  const made = await downloads(store, async () => new Response('x'.repeat(100_000), { status: 504 }));
  const error = await failure(made);
  assert.ok(error.message.length < 300 && /status 504 x/.test(error.message));
  assert.equal(made.keptOf(NAME), 400);
  await made.keeper.idle();
  assert.deepEqual(store.slices.get(`${NAME}.part`), DATA.subarray(0, 400));
  await made.keeper.clear();
  assert.equal(store.slices.size, 0);
});
