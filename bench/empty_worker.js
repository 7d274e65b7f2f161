/** A worker that does nothing: how soon any worker could speak here (kernel_timing.js, spawnFloor). */
postMessage({ ms: 0 });
