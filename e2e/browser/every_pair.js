// Show every pair of situations one after the other: what is shown must not depend on what was shown before.
async () => {
    const { View } = await import('/src/ui/view.js');
    const { lookAtDevice } = await import('/src/device.js');
    document.getElementById('missing').hidden = true;
    const device = lookAtDevice();
    const view = new View(device);
    const status = {
        state: 'SERVING', reason: '', retryInS: null, relay: 'r', path: 'webrtc', seal: 'sealed', sealWhy: 'why', backbone: '12ab',
        kernel: 'wasm', gbPerS: 2, kernelTest: 'passed', calls: 7, rows: 9, failed: 1, tokens: 3, paired: true, sinceCallS: 1,
        layers: 3, experts: 12, wanted: 12, loaded: 12, heldBytes: 84.6e6, pledgedBytes: 1e8, medianMs: 2, rttMs: 1, bytesIn: 1e6,
        bytesOut: 2e6, store: 'opfs', keptBytes: 84.6e6, storeTrouble: '', lastFault: '', lastFaultCode: '',
    };
    const zero = { ...status, path: '', seal: 'none', sealWhy: '', backbone: null, kernel: '', gbPerS: 0, calls: 0, rows: 0, failed: 0,
        tokens: 0, sinceCallS: null, layers: 0, experts: 0, wanted: 0, loaded: 0, heldBytes: 0, medianMs: null, rttMs: null, bytesIn: 0,
        bytesOut: 0, keptBytes: 0, paired: false };
    const base = {
        device, status: null, running: false, failed: false, hold: null, around: { battery: null, metered: false, awake: false }, lane: null,
        offer: null, before: { calls: 0, rows: 0, tokens: 0 }, keptBytes: 0, goneBytes: 0, deleting: false, asking: false, leaving: false,
        chosenMb: 512, notice: '',
    };
    const lane = { lane: 'webrtc', why: 'faster', age_s: 3, model: 'demo' };
    const run = (more, facts = {}) => ({ ...base, running: true, lane, keptBytes: 84.6e6, ...facts, status: { ...status, ...more } });
    const situations = {
        fresh: base,
        offered: { ...base, offer: { models: [{ name: 'demo', size_bytes: 85e6, nodes: 2 }] } },
        nothing: { ...base, offer: { models: [] } },
        kept: { ...base, keptBytes: 84.6e6 },
        deleting: { ...base, keptBytes: 84.6e6, deleting: true },
        gone: { ...base, goneBytes: 84.6e6 },
        asking: { ...base, asking: true, around: { battery: { level: 0.4, charging: false }, metered: true, awake: false } },
        failed: { ...base, failed: true, notice: 'it ended' },
        starting: { ...base, running: true },
        connecting: { ...base, running: true, status: { ...zero, state: 'CONNECTING', kernelTest: 'untested' } },
        again: run({ state: 'CONNECTING', reason: 'the connection broke', paired: false, seal: 'none' }, { lane: null }),
        greeted: { ...base, running: true, status: { ...zero, state: 'GREETED', kernelTest: 'untested' } },
        waiting: run({ state: 'OFFERED', paired: false, seal: 'none' }, { lane: null }),
        spare: { ...base, running: true, status: { ...zero, state: 'OFFERED', paired: true } },
        refused: { ...base, running: true, status: { ...zero, state: 'OFFERED', seal: 'refused', sealWhy: 'another key' } },
        loading: run({ state: 'ASSIGNED', loaded: 5, lastFault: 'x', lastFaultCode: 'slice_fault' }),
        idle: run({ sinceCallS: 60 }),
        helping: run({}),
        unsealed: run({ seal: 'unsealed', sealWhy: 'plain http' }),
        full: run({ storeTrouble: 'full' }),
        stuck: run({ storeTrouble: 'stuck' }),
        memory: run({ store: 'memory' }, { keptBytes: 0 }),
        paused: run({ state: 'PAUSED' }, { hold: 'owner' }),
        battery: run({ state: 'PAUSED' }, { hold: 'battery', around: { battery: { level: 0.04, charging: false }, metered: false, awake: true } }),
        metered: run({ state: 'PAUSED' }, { hold: 'metered', around: { battery: { level: 1, charging: true }, metered: true, awake: true } }),
        asleep: run({ state: 'ASLEEP', paired: false }, { lane: null }),
        leaving: run({ state: 'DRAINING' }, { leaving: true }),
        left: { ...base, status: { ...status, state: 'CLOSED', reason: 'left', paired: false, heldBytes: 0, seal: 'none' }, keptBytes: 84.6e6 },
        stopped: { ...base, status: { ...zero, state: 'CLOSED', reason: 'the relay refused this identity' } },
    };
    const main = document.querySelector('main');
    const own = (node) => [...node.childNodes].filter((child) => child.nodeType === 3).map((child) => child.data.trim()).join('');
    const told = (node) => [node.tagName, ...[...node.attributes].map((a) => `${a.name}=${a.value}`).sort(), own(node)].join(' ');
    const snapshot = () => [document.body, ...document.body.querySelectorAll('*')].map(told).join('\n') + document.title;
    const wrong = [], texts = {};
    for (const [to, after] of Object.entries(situations)) {
        const shown = new Map();
        for (const [from, before] of Object.entries(situations)) {
            view.show(before);
            view.show(after);
            shown.set(snapshot(), from);
        }
        if (shown.size !== 1) wrong.push(`${to}: differs after ${[...shown.values()].join(', ')}`);
        texts[to] = snapshot();
        for (const bad of ['undefined', 'NaN', '[object', '(1006)', '. .', '..']) if (main.innerText.includes(bad)) wrong.push(`${to}: ${bad}`);
    }
    const same = Object.keys(texts).filter((name, i, all) => all.slice(0, i).some((other) => texts[other] === texts[name]));
    return { wrong, same };
}
