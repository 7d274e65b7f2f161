/**
 * What a transport offers: whole frames to the other end and back. The node knows no other thing about it.
 *
 * @typedef {object} TransportHandlers
 * @property {() => void} onOpen  once
 * @property {(data: ArrayBuffer | string) => void} onMessage
 * @property {(code: number, reason: string) => void} onClosed  once, unless `close` was called; 0: never opened
 *
 * @typedef {object} Transport
 * @property {string} path  how the bytes travel, for people: "relayed"
 * @property {number} bytesSent
 * @property {number} bytesReceived
 * @property {number} movedBytes  what came, and what left after it had to wait, as far as the transport can tell
 * @property {(data: Uint8Array) => void} send  hands the frame to the network, in its turn; dropped when closed
 * @property {(code: number, reason: string) => void} close  after it no handler is called
 *
 * @typedef {(handlers: TransportHandlers) => Transport} Connect
 */

export {};
