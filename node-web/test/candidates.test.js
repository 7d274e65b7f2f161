/** Which ICE candidates of the backbone are tried, and which URLs are dialled. The headless node reads the same vectors. */

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { Candidates } from '../src/transports/candidates.js';
import { RtcHost } from '../src/transports/webrtc.js';
import { linkUrl } from '../src/transports/websocket.js';

const VECTORS = new URL('../../tests/vectors/candidates.json', import.meta.url);

for (const { about, candidates, taken } of JSON.parse(readFileSync(VECTORS, 'utf8')).cases) {
  test(`candidates: ${about}`, () => {
    const book = new Candidates();
    assert.deepEqual(candidates.map((/** @type {string} */ each) => book.take(each)), taken);
  });
}

test('a connection hears of bounded candidates only, in the offer and after it', async () => {
  const line = (/** @type {string} */ address) => `candidate:1 1 UDP 2122 ${address} 5000 typ host`;
  /** @type {string[]} */
  const heard = [];
  class Connection {
    localDescription = { sdp: 'mine' };
    /** @param {{sdp: string}} offer */
    async setRemoteDescription({ sdp }) {
      heard.push(...sdp.split('\n').filter((each) => each.startsWith('a=candidate')));
    }
    async setLocalDescription() {}
    /** @param {{candidate: string}} candidate */
    async addIceCandidate({ candidate }) {
      heard.push(candidate);
    }
    close() {}
  }
  const host = new RtcHost(/** @type {typeof RTCPeerConnection} */ (/** @type {unknown} */ (Connection)));
  const { port1, port2 } = new MessageChannel();
  const sdp = ['v=0', ...Array.from({ length: 10 }, (_, i) => `a=${line(`9.9.9.${i + 1}`)}`), `a=${line('127.0.0.1')}`].join('\n');
  const answered = new Promise((resolve) => port1.addEventListener('message', resolve, { once: true }));
  port1.start();
  await host.answer({ sdp, stun: undefined, port: port2 });
  await answered;
  for (let i = 1; i < 20; i++) port2.onmessage?.(/** @type {MessageEvent} */ ({ data: { type: 'candidate', candidate: line(`8.8.8.${i}`), mid: '0' } }));
  assert.equal(heard.length, 16);
  assert.ok(!heard.some((each) => each.includes('127.0.0.1')));
  port1.close();
  port2.close();
});

test('announced URLs become those to dial, with our path', () => {
  assert.equal(linkUrl('ws://192.0.2.1:9000', '8.8.8.8'), 'ws://192.0.2.1:9000/v1/link');
  assert.equal(linkUrl('https://box.example', 'relay.example'), 'wss://box.example/v1/link');
  assert.equal(linkUrl('ws://127.0.0.1:9', 'localhost'), 'ws://127.0.0.1:9/v1/link');
  assert.equal(linkUrl('ws://192.168.1.2:9', '10.0.0.1'), 'ws://192.168.1.2:9/v1/link');
});

for (const [url, relay] of [
  ['nonsense', 'relay.example'],
  ['https://box.example/swarm/', 'relay.example'],
  ['ws://a@box.example', 'relay.example'],
  ['ws://box.example/?x=1', 'relay.example'],
  ['ftp://box.example', 'relay.example'],
  ['ws://127.0.0.1:9', '192.168.1.2'],
  ['ws://[::1]:9', 'relay.example'],
  ['ws://2130706433:9', 'relay.example'],
  ['ws://localhost:9', 'relay.example'],
  ['ws://[::ffff:127.0.0.1]:9', 'relay.example'],
  ['ws://192.168.1.2:9', 'relay.example'],
  ['ws://printer.local', 'relay.example'],
  ['ws://169.254.169.254', '127.0.0.1'],
  ['ws://100.100.100.200', '192.168.1.2'],
]) {
  test(`${url} is not dialled for a backbone behind ${relay}`, () => {
    assert.throws(() => linkUrl(url, relay));
  });
}
