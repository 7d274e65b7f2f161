// h in int8 blocks, as down wants it; or, where down wants floats (block 0), only the check that all are finite.
struct Params {
  cols: u32,
  block: u32,
  num_blocks: u32,   // of all picks
  width: u32,
}
@group(0) @binding(0) var<storage, read> H: array<u32>;            // [picks, cols] floats
@group(0) @binding(1) var<storage, read_write> X: array<u32>;      // per pick: scales, then ints
@group(0) @binding(2) var<storage, read_write> bad: array<atomic<u32>>;
@group(0) @binding(3) var<uniform> p: Params;
var<workgroup> most: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
  let index = group.y * p.width + group.x;
  if (index >= p.num_blocks) { return; }
  let size = select(p.block, p.cols, p.block == 0u);
  let blocks = p.cols / size;
  let pick = index / blocks;
  let b = index % blocks;
  let from_ = pick * p.cols + b * size;
  var amax = 0.0;
  for (var c = t; c < size; c += 64u) {
    let h = H[from_ + c];
    if ((h & 0x7f800000u) == 0x7f800000u) { atomicOr(&bad[0], 1u); }
    amax = max(amax, abs(bitcast<f32>(h)));
  }
  if (p.block == 0u) {
    for (var c = t; c < size; c += 64u) { X[from_ + c] = H[from_ + c]; }
    return;
  }
  most[t] = amax;
  workgroupBarrier();
  for (var half = 32u; half > 0u; half >>= 1u) {
    if (t < half) { most[t] = max(most[t], most[t + half]); }
    workgroupBarrier();
  }
  amax = most[0];
  var scale = 0.0;
  var inverse = 0.0;
  if (amax >= 7.888609052210118e-31) {   // 2^-100
    scale = amax / 127.0;
    inverse = 1.0 / scale;
  }
  let to = pick * (blocks + p.cols / 4u);
  if (t == 0u) { X[to + b] = bitcast<u32>(scale); }
  for (var w = t; w < size / 4u; w += 64u) {
    var word = 0u;
    for (var k = 0u; k < 4u; k++) {
      let q = clamp(i32(round(bitcast<f32>(H[from_ + 4u * w + k]) * inverse)), -127, 127);
      word |= (bitcast<u32>(q) & 0xffu) << (8u * k);
    }
    X[to + blocks + b * size / 4u + w] = word;
  }
}
