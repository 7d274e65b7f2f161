/** The driver between a relay, a kernel and a store that run in this process. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { NodeClient } from '../src/client.js';
import { Unreachable } from '../src/errors.js';
import { KernelMemoryFull } from '../src/kernels/kernel.js';
import { Keeper } from '../src/store.js';
import { decodePartialCall } from '../src/wire/calls.js';
import { FakeKernel, FakeRelay, FakeStore, FORMULA, sha256 } from './fakes.js';

const SLICES = [1, 2, 3].map((worth) => new Uint8Array(102).fill(worth));

/** @param {{store?: FakeStore, kernel?: FakeKernel, others?: FakeKernel[], budget?: number, body?: (slice: string, tries: number) => Uint8Array|number}} [options] */
async function node({ store = new FakeStore(), kernel = new FakeKernel(), others = [], budget = 1000, body } = {}) {
  const relay = new FakeRelay();
  const keeper = new Keeper(store, budget, 20);
  await keeper.open();
  /** @type {string[]} */
  const fetched = [];
  /** @type {(() => void)[]} */
  const deferred = [];
  /** @type {((experts: any[], why: string) => void)[]} */
  const lose = [];
  const client = new NodeClient({
    memoryBytes: 1000,
    name: 'test',
    agent: 'test',
    identity: { id: '1'.repeat(32), secret: '2'.repeat(32) },
    power: { battery: null, metered: false },
    connect: relay.connect,
    loadKernel: async (onLost) => {
      lose.push(onLost);
      return lose.length === 1 ? kernel : others[lose.length - 2];
    },
    dropKernel: () => lose.length <= others.length,
    keeper,
    random: () => 0,
    defer: (task) => deferred.push(task),
    fetchSlice: async (slice) => {
      fetched.push(slice);
      const tries = fetched.filter((other) => other === slice).length;
      const found = body?.(slice, tries) ?? SLICES.find((data) => sha256(data) === slice) ?? 404;
      return typeof found === 'number' ? new Response('no', { status: found }) : new Response(new Uint8Array(found));
    },
  });
  return { relay, client, store, kernel, keeper, fetched, deferred, lose };
}

/** @param {any} message */
const offer = (message) => message.type === 'Offer';
/** @param {number} experts */
const ready = (experts) => (/** @type {any} */ message) => message.type === 'SliceReady' && (message.experts[0]?.length ?? 0) === experts;
/** @param {number} callId */
const partial = (callId) => (/** @type {any} */ message) => message.type === 'Partial' && message.callId === callId;

/** A node that holds all slices. @param {Parameters<typeof node>[0]} [options] */
async function serving(options) {
  const all = await node(options);
  all.client.start();
  await all.relay.hear(offer);
  all.relay.assign(1, SLICES);
  await all.relay.hear(ready(3));
  return all;
}

test('a node joins, fetches, announces and answers a dispatch', async () => {
  const { relay, client, fetched } = await serving();
  assert.deepEqual(fetched, SLICES.map(sha256));
  relay.dispatch(7, [0, 2]);
  const { payload } = await relay.hear(partial(7));
  const { layer, hiddenDim, widths, data } = decodePartialCall(payload);
  assert.deepEqual([layer, hiddenDim, [...widths], data[0]], [0, 32, [4], 1 + 3]);
  const status = client.status();
  assert.deepEqual([status.state, status.calls, status.rows, status.layers, status.experts], ['SERVING', 1, 1, 1, 3]);
  client.leave('done');
});

test('a node whose kernel fails its test says Bye and never offers', async () => {
  const kernel = new FakeKernel();
  kernel.fault = 'wrong hash';
  const { relay, client } = await node({ kernel });
  client.start();
  await new Promise((wake) => setTimeout(wake, 5));
  assert.equal(client.status().state, 'CLOSED');
  assert.match(client.status().reason, /wrong hash/);
  assert.ok(!relay.heard.some(offer));
});

test('a kernel that cannot be loaded for the moment is asked for again', async () => {
  const { relay, client, kernel } = await node();
  let tries = 0;
  client.options.loadKernel = async () => {
    tries += 1;
    if (tries === 1) throw new Unreachable('status 502');
    return kernel;
  };
  client.start();
  await relay.hear(offer);
  assert.equal(tries, 2);
  client.leave('done');
});

test('bytes that are not the slice are refused and fetched again', async () => {
  const wrong = new Uint8Array(102).fill(9);
  const { client, fetched } = await serving({ body: (slice, tries) => (slice === sha256(SLICES[1]) && tries === 1 ? wrong : 0) || find(slice) });
  assert.equal(fetched.filter((slice) => slice === sha256(SLICES[1])).length, 2);
  assert.match(client.status().lastFault, /hash to/);
  client.leave('done');
});

test('a body that is too long, too short or no success is refused and fetched again', async () => {
  const answers = [new Uint8Array(103), new Uint8Array(101), 504];
  const { client, fetched } = await serving({ body: (slice, tries) => (tries === 1 ? answers[SLICES.findIndex((data) => sha256(data) === slice)] : find(slice)) });
  assert.equal(fetched.length, 6);
  client.leave('done');
});

test('slices kept from a former visit are offered and not fetched again', async () => {
  const store = new FakeStore();
  for (const data of SLICES) await store.write(sha256(data), data);
  const { relay, client, fetched } = await node({ store });
  client.start();
  assert.deepEqual((await relay.hear(offer)).inventory, SLICES.map(sha256).sort());
  relay.assign(1, SLICES);
  await relay.hear(ready(3));
  assert.deepEqual(fetched, []);
  client.leave('done');
});

test('a kept slice that was cut off or changed is fetched again', async () => {
  const store = new FakeStore();
  await store.write(sha256(SLICES[0]), SLICES[0].subarray(0, 50));
  await store.write(sha256(SLICES[1]), new Uint8Array(102).fill(8));
  const { client, fetched, keeper } = await serving({ store });
  await keeper.idle();
  assert.deepEqual(fetched.sort(), SLICES.map(sha256).sort());
  assert.deepEqual(store.slices.get(sha256(SLICES[1])), SLICES[1]);
  client.leave('done');
});

test('a full store leaves slices in memory only and says so', async () => {
  const store = new FakeStore();
  store.roomBytes = 150;
  const { client, kernel, keeper } = await serving({ store });
  await keeper.idle();
  assert.equal(store.slices.size, 1);
  assert.equal(client.status().storeTrouble, 'full');
  assert.equal(kernel.usedBytes, 306);
  client.leave('done');
});

test('a store that never answers holds nobody up', async () => {
  const store = new FakeStore();
  store.write = () => new Promise(() => {});
  const { client, keeper } = await serving({ store });
  assert.equal(client.status().state, 'SERVING');
  await keeper.idle();
  assert.equal(client.status().storeTrouble, 'stuck');
  client.leave('done');
});

test('the store makes room by dropping what is no longer wanted', async () => {
  const store = new FakeStore();
  await store.write('0'.repeat(64), new Uint8Array(250));
  const { client, keeper } = await serving({ store, budget: 400 });
  await keeper.idle();
  assert.deepEqual(keeper.inventory(), SLICES.map(sha256).sort());
  client.leave('done');
});

test('a call cancelled while another one computes is not computed', async () => {
  const { relay, client, kernel, deferred } = await serving();
  relay.dispatch(1, [0]);
  await relay.hear(partial(1));
  relay.dispatch(2, [1]); // at once after the first: deferred until the waiting messages were read
  relay.cancel(2);
  relay.dispatch(3, [2]);
  await new Promise((wake) => setTimeout(wake, 5));
  for (let task = deferred.shift(); task !== undefined; task = deferred.shift()) task();
  await relay.hear(partial(3));
  assert.deepEqual(kernel.computed.slice(-2), [1, 3]);
  assert.ok(!relay.heard.some(partial(2)));
  assert.equal(client.machine.counters.cancelled, 1);
  client.leave('done');
});

test('an expert that is not held and a corrupt dispatch are refused by name', async () => {
  const { relay, client } = await serving();
  relay.dispatch(1, [0, 7]);
  const failure = await relay.hear((message) => message.type === 'Failure');
  assert.deepEqual([failure.code, failure.callId, failure.expert], ['not_held', 1, 7]);
  client.leave('done');
});

test('a kernel that fails during a call fails that call and is tested again', async () => {
  const { relay, client, kernel } = await serving();
  kernel.during = () => {
    kernel.fault = 'broken';
    throw new Error('trap');
  };
  relay.dispatch(1, [0]);
  const failure = await relay.hear((message) => message.type === 'Failure');
  assert.deepEqual([failure.code, failure.phase], ['kernel_fault', 'compute']);
  assert.equal(client.status().state, 'CLOSED');
});

test('a lost session is opened again with the same id and what is held, without fetching', async () => {
  const { relay, client, fetched } = await serving();
  relay.end?.close(1001, 'restart');
  relay.heard = [];
  const hello = await relay.hear((message) => message.type === 'Hello');
  assert.deepEqual([hello.id, hello.resume], ['1'.repeat(32), true]);
  assert.deepEqual((await relay.hear(offer)).inventory, SLICES.map(sha256).sort());
  relay.assign(4, SLICES);
  await relay.hear((message) => message.type === 'SliceReady' && message.epoch === 4);
  assert.equal(fetched.length, 3);
  client.leave('done');
});

test('a node that slept says Bye, wakes, is tested and joins again', async () => {
  const { relay, client } = await serving();
  client.sleep('page frozen');
  const bye = await relay.hear((message) => message.type === 'Bye');
  assert.equal(bye.reason, 'page frozen');
  assert.equal(client.status().state, 'ASLEEP');
  relay.heard = [];
  client.wake();
  assert.equal((await relay.hear(offer)).inventory.length, 3);
  client.leave('done');
});

test('an empty assignment frees all memory', async () => {
  const { relay, client, kernel } = await serving();
  relay.assign(2, []);
  await relay.hear((message) => message.type === 'SliceReady' && message.epoch === 2);
  assert.equal(kernel.usedBytes, 0);
  client.leave('done');
});

/** @param {string} slice @returns {Uint8Array} */
function find(slice) {
  return /** @type {Uint8Array} */ (SLICES.find((data) => sha256(data) === slice));
}

test('a kernel that begins to compute wrongly is replaced by the next build, which gets the slices from the store', async () => {
  const second = new FakeKernel();
  second.build = 'second';
  const { relay, client, kernel, fetched, deferred } = await serving({ others: [second] });
  kernel.during = () => {
    kernel.fault = 'wrong once hot';
    throw new Error('odd');
  };
  relay.dispatch(1, [0]);
  assert.equal((await relay.hear((m) => m.type === 'Failure')).code, 'kernel_fault');
  assert.equal((await relay.hear(ready(0))).type, 'SliceReady');
  await relay.hear(ready(3));
  relay.dispatch(2, [0, 2]);
  while (second.computed.at(-1) !== 4) {
    deferred.splice(0).forEach((task) => task());
    await new Promise((resolve) => setTimeout(resolve, 1));
  }
  const { payload } = await relay.hear(partial(2));
  assert.equal(decodePartialCall(payload).data[0], 4);
  assert.deepEqual([client.status().kernel, client.status().kernelTest, kernel.usedBytes], ['second', 'passed', 306]);
  assert.equal(fetched.length, 3, 'nothing came over the network again');
  client.leave('done');
});

test('what a kernel loses is announced and fetched again, and calls for it are refused meanwhile', async () => {
  const { relay, client, lose, fetched } = await serving();
  lose[0]([/** @type {any} */ (client.host.held.get(sha256(SLICES[1]))).packed], 'a worker died');
  const heard = await relay.hear(ready(2));
  assert.deepEqual(heard.experts[0], [0, 2]);
  await relay.hear(ready(3));
  relay.dispatch(3, [1]);
  await relay.hear(partial(3));
  assert.equal(fetched.length, 3);
  assert.match(client.status().lastFault, /1 experts lost: a worker died/);
  client.leave('done');
});

test('a kernel that answers later serves several calls at once', async () => {
  const kernel = new FakeKernel();
  const now = kernel.partial.bind(kernel);
  /** @type {(() => void)[]} */
  const waiting = [];
  kernel.partial = (call) => new Promise((resolve) => waiting.push(() => resolve(now(call))));
  const proving = setInterval(() => waiting.splice(0).forEach((finish) => finish()), 1);
  Object.assign(kernel, { width: 2 });
  const { relay, client, deferred } = await serving({ kernel });
  clearInterval(proving);
  relay.dispatch(1, [0]);
  relay.dispatch(2, [1]);
  while (waiting.length < 2) {
    deferred.splice(0).forEach((task) => task());
    await new Promise((resolve) => setTimeout(resolve, 1));
  }
  waiting[1]();
  await relay.hear(partial(2));
  waiting[0]();
  await relay.hear(partial(1));
  client.leave('done');
});

test('a node without memory for what it pledged lowers its pledge to what it holds and fetches no more', async () => {
  const kernel = new FakeKernel();
  const pack = kernel.pack.bind(kernel);
  kernel.pack = (formula, slice) => {
    if (slice.length === 102 && kernel.usedBytes >= 102) throw new KernelMemoryFull(102, kernel.usedBytes);
    return pack(formula, slice);
  };
  const { relay, client, fetched } = await node({ kernel });
  client.start();
  await relay.hear(offer);
  relay.assign(1, SLICES);
  const lowered = await relay.hear((m) => m.type === 'Offer' && m.memoryBytes < 1000);
  assert.deepEqual([lowered.memoryBytes, lowered.inventory.length], [102, 1]);
  await new Promise((wake) => setTimeout(wake, 20));
  assert.ok(fetched.length <= 3 && client.host.bytesIn <= 3 * 102);
  assert.equal(client.status().state, 'SERVING');
  client.leave('done');
});

test('bytes that are always wrong are fetched twice, then refused to the relay by name', async () => {
  const wrong = sha256(SLICES[1]);
  const { relay, client, fetched } = await node({ body: (slice) => (slice === wrong ? new Uint8Array(102).fill(9) : find(slice)) });
  client.start();
  await relay.hear(offer);
  relay.assign(1, SLICES);
  const said = await relay.hear((m) => m.type === 'SliceReady' && m.refused !== undefined);
  assert.deepEqual(said.refused, { 0: [1] });
  assert.match(said.why, /hash to/);
  assert.equal(fetched.filter((slice) => slice === wrong).length, 2);
  client.leave('done');
});

test('a layer that no kernel here can compute is refused at once, and nothing of it is fetched', async () => {
  const { relay, client, fetched } = await node();
  client.start();
  await relay.hear(offer);
  relay.assign(1, SLICES, { ...FORMULA, up_type: 99 });
  const said = await relay.hear((m) => m.type === 'SliceReady' && m.refused !== undefined);
  assert.deepEqual([said.refused, said.why, fetched], [{ 0: [0, 1, 2] }, 'formula not supported yet: weight format 99', []]);
  assert.equal(client.machine.counters.sessions, 1);
  client.leave('done');
});

test('another kernel is offered anew, with its name', async () => {
  const second = new FakeKernel();
  second.build = 'second';
  const { relay, client, kernel } = await serving({ others: [second] });
  kernel.during = () => {
    kernel.fault = 'wrong once hot';
    throw new Error('odd');
  };
  relay.dispatch(1, [0]);
  const again = await relay.hear((m) => m.type === 'Offer' && m.kernel === 'second');
  assert.equal(again.memoryBytes, 1000);
  client.leave('done');
});
