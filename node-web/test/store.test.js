/** Stores and their keeper: the Cache API by a stand-in (OPFS is tested in a real browser), budget and eviction. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { CacheStore, Keeper, NoStore, openStore } from '../src/store.js';
import { FakeStore } from './fakes.js';

const ID = (/** @type {string} */ digit) => digit.repeat(64);

/** As much of the Cache API as the store uses. */
class FakeCache {
  /** @type {Map<string, Response>} */
  entries = new Map();
  full = false;

  async keys() {
    return [...this.entries.keys()].map((path) => ({ url: `http://page${path}` }));
  }

  /** @param {any} request */
  async match(request) {
    return this.entries.get(typeof request === 'string' ? request : new URL(request.url).pathname)?.clone();
  }

  /** @param {string} path @param {Response} response */
  async put(path, response) {
    if (this.full) throw new DOMException('no room', 'QuotaExceededError');
    this.entries.set(path, response);
  }

  /** @param {string} path */
  async delete(path) {
    return this.entries.delete(path);
  }
}

test('the cache store gives back what it was given, and forgets', async () => {
  const store = new CacheStore(/** @type {any} */ (new FakeCache()));
  assert.equal(await store.write(ID('a'), Uint8Array.of(1, 2, 3)), 'kept');
  assert.deepEqual(await store.read(ID('a')), Uint8Array.of(1, 2, 3));
  assert.deepEqual(await store.list(), new Map([[ID('a'), 3]]));
  await store.remove(ID('a'));
  assert.equal(await store.read(ID('a')), null);
});

test('a full cache refuses without throwing', async () => {
  const cache = new FakeCache();
  cache.full = true;
  assert.equal(await new CacheStore(/** @type {any} */ (cache)).write(ID('a'), new Uint8Array(3)), 'full');
});

test('where neither OPFS nor the Cache API works nothing is kept', async () => {
  const store = await openStore();
  assert.equal(store.kind, 'memory');
  assert.equal(await store.write(ID('a'), new Uint8Array(1)), 'refused');
});

test('the keeper never exceeds its budget and drops only what is not wanted', async () => {
  const keeper = new Keeper(new FakeStore(), 250);
  keeper.write(ID('a'), new Uint8Array(100), () => true);
  keeper.write(ID('b'), new Uint8Array(100), () => true);
  keeper.write(ID('c'), new Uint8Array(100), () => true); // no room, everything is wanted
  await keeper.idle();
  assert.deepEqual(keeper.inventory(), [ID('a'), ID('b')]);
  keeper.write(ID('c'), new Uint8Array(100), (slice) => slice !== ID('a'));
  await keeper.idle();
  assert.deepEqual(keeper.inventory(), [ID('b'), ID('c')]);
  assert.equal(keeper.trouble, '');
});

test('the keeper tells a full device from a full budget', async () => {
  const store = new FakeStore();
  store.roomBytes = 50;
  const keeper = new Keeper(store, 1000);
  keeper.write(ID('a'), new Uint8Array(100), () => true);
  await keeper.idle();
  assert.equal(keeper.trouble, 'full');
  const none = new Keeper(new NoStore(), 1000);
  none.write(ID('a'), new Uint8Array(100), () => true);
  await none.idle();
  assert.equal(none.trouble, '');
});

test('clearing removes what former visits left too', async () => {
  const store = new FakeStore();
  await store.write(ID('a'), new Uint8Array(10));
  await new Keeper(store, 0).clear();
  assert.equal(store.slices.size, 0);
});
