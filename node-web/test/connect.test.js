/** Connecting to the relay: a browser slows down WebSockets after failures, so a relay that was away is asked for first. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { relayConnector } from '../src/transports/websocket.js';
import { CloseCode, inWords, WORDS } from '../src/wire/close.js';

const PAGE = 'https://relay.example/swarm/';
const turn = () => new Promise((resolve) => setTimeout(resolve));

/** Sockets that a test opens and ends by hand, and what was asked by HTTP. */
function network() {
  /** @type {any[]} */
  const sockets = [];
  /** @type {string[]} */
  const asked = [];
  /** @type {string[]} */
  const heard = [];
  const net = { status: 0, sockets, asked, heard };
  class Socket {
    /** @param {string} url */
    constructor(url) {
      this.url = url;
      sockets.push(this);
    }
    close() {}
  }
  const ask = async (/** @type {URL} */ url) => {
    asked.push(url.href);
    if (net.status === 0) throw new TypeError('Failed to fetch');
    return new Response('', { status: net.status });
  };
  const connect = relayConnector(PAGE, /** @type {any} */ (Socket), ask);
  const handlers = {
    onOpen: () => heard.push('open'),
    onMessage: () => {},
    onClosed: (/** @type {number} */ code) => heard.push(`closed ${code}`),
  };
  return { ...net, net, connect: () => connect(handlers) };
}

test('the first try opens a socket at once; after a failure only when the relay answers', async () => {
  const { net, sockets, asked, heard, connect } = network();
  connect();
  assert.equal(sockets.length, 1);
  assert.deepEqual(asked, []);
  sockets[0].onclose({ code: 1006, reason: '' });
  for (const status of [0, 502, 504]) {
    net.status = status;
    connect();
    await turn();
  }
  assert.equal(sockets.length, 1, 'nothing that the browser would count as a failed socket');
  assert.deepEqual(heard, ['closed 0', 'closed 0', 'closed 0', 'closed 0']);
  net.status = 200;
  connect();
  await turn();
  assert.equal(sockets.length, 2);
  assert.deepEqual(new Set(asked), new Set(['https://relay.example/swarm/healthz']));
});

test('a session that had been open is tried again without asking', async () => {
  const { sockets, asked, connect } = network();
  connect();
  sockets[0].onopen();
  sockets[0].onclose({ code: 1006, reason: '' });
  connect();
  assert.equal(sockets.length, 2);
  assert.deepEqual(asked, []);
});

test('what was closed before the relay answered opens nothing later', async () => {
  const { net, sockets, heard, connect } = network();
  connect();
  sockets[0].onclose({ code: 1006, reason: '' });
  net.status = 200;
  connect().close(1000, '');
  await turn();
  assert.equal(sockets.length, 1);
  assert.deepEqual(heard, ['closed 0']);
});

test('why a session ended is said in words, for every code', () => {
  for (const code of [0, 1006, 1011, 4999, ...Object.values(CloseCode)]) {
    assert.match(inWords(code, ''), /^[^\d]+$/);
    assert.equal(inWords(code, 'as it said'), 'as it said');
  }
  assert.deepEqual([...WORDS.keys()].sort(), [0, ...Object.values(CloseCode)].sort());
});
