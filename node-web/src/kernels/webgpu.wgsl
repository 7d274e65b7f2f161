// The expert on a graphics device: wasm/CONTRACT.md in WGSL, over GGUF blocks as they are. Pieces, cut at the lines that
// begin with `//@`; webgpu.js and backbone/experts/webgpu.py put them together the same way:
//
//   hidden    head dot + format and matrix for gate_ and up_ + "hidden":  h = silu(gate . x) * (up . x)
//   quantise  "quantise":                                               h in int8 blocks, as down wants it
//   down      head dot + format and matrix for down_ + "down":            p = weight * (down . h)
//
// `$` is the matrix ("gate_", "up_", "down_"). One workgroup computes one row of weights for up to four picks: its threads
// take 32 columns each, in integers; then one float term per block; then the terms in their order, as the contract has it.
// A device may still fuse, reorder or flush what WGSL lets it: that is why this is a class of its own (CONTRACT.md).
// Everything fits the limits every device has: 8 storage buffers, 16 KB of workgroup memory, 64 threads.

//@ dot packed
fn dot4(a: u32, b: u32) -> i32 {
  return dot4I8Packed(a, b);
}

//@ dot plain
fn dot4(a: u32, b: u32) -> i32 {
  let x = bitcast<i32>(a);
  let y = bitcast<i32>(b);
  return extractBits(x, 0u, 8u) * extractBits(y, 0u, 8u) + extractBits(x, 8u, 8u) * extractBits(y, 8u, 8u)
    + extractBits(x, 16u, 8u) * extractBits(y, 16u, 8u) + extractBits(x, 24u, 8u) * extractBits(y, 24u, 8u);
}

//@ head
// X: rows of activations, as words: the scales of the blocks, then the ints, four a word; or floats.
struct Params {
  rows: u32,        // of the weights
  cols: u32,
  x_words: u32,     // of one row of X
  first_pick: u32,  // picks stand sorted by expert; one dispatch is one expert
  num_picks: u32,
  width: u32,       // workgroups beside one another in x; the rest stand in y
  x_block: u32,     // columns of one scale of X, 0 for floats
  unused: u32,
}
var<workgroup> whole: array<i32, 256>;   // [64 threads][4 picks]: the part with the scale
var<workgroup> lows: array<i32, 256>;    // the part with the minimum
var<workgroup> terms: array<f32, 256>;

//@ matrix ints
// Dot of one row with up to four rows of X; the result for pick k is thread k's.
fn $dot(row: u32, t: u32, picks: u32) -> f32 {
  let at = row * (p.cols / $COLS) * $BYTES;
  let subs = p.cols / 32u;
  let blocks = p.cols / $COLS;
  let per_block = $COLS / 32u;
  var total = 0.0;
  for (var base = 0u; base < subs; base += 64u) {
    let s = base + t;
    if (s < subs) {
      let block = at + s / per_block * $BYTES;
      $unpack(block, s % per_block);
      for (var k = 0u; k < picks; k++) {
        let x = x_row(k) * p.x_words + blocks_of_x() + s * 8u;
        let both = $sub(x);
        whole[t * 4u + k] = both.x;
        lows[t * 4u + k] = both.y;
      }
    }
    workgroupBarrier();
    let b = base / per_block + t;
    if (t < 64u / per_block && b < blocks) {
      for (var k = 0u; k < picks; k++) {
        var i = 0;
        var m = 0;
        for (var j = 0u; j < per_block; j++) {
          i += whole[(t * per_block + j) * 4u + k];
          m += lows[(t * per_block + j) * 4u + k];
        }
        let dx = bitcast<f32>(X[x_row(k) * p.x_words + b * $COLS / p.x_block]);
        terms[t * 4u + k] = $term(at + b * $BYTES, dx, f32(i), f32(m));
      }
    }
    workgroupBarrier();
    if (t < picks) {
      let n = min(64u / per_block, blocks - base / per_block);
      for (var j = 0u; j < n; j++) { total = total + terms[j * 4u + t]; }
    }
    workgroupBarrier();
  }
  return total;
}
fn $byte(at: u32) -> u32 {
  return ($W[at >> 2u] >> (8u * (at & 3u))) & 0xffu;
}
fn $half(at: u32) -> f32 {
  return unpack2x16float($byte(at) | ($byte(at + 1u) << 8u)).x;
}
fn $word(at: u32) -> u32 {
  let low = $W[at >> 2u];
  let shift = 8u * (at & 3u);
  if (shift == 0u) { return low; }
  return (low >> shift) | ($W[(at >> 2u) + 1u] << (32u - shift));
}
var<private> $q: array<u32, 8>;   // 32 weights, four a word, as signed bytes

fn $dots(x: u32, first: u32, count: u32) -> i32 {
  var sum = 0;
  for (var i = first; i < first + count; i++) { sum += dot4($q[i], X[x + i]); }
  return sum;
}
fn $sum(x: u32, first: u32, count: u32) -> i32 {
  var sum = 0;
  for (var i = first; i < first + count; i++) { sum += dot4(0x01010101u, X[x + i]); }
  return sum;
}

//@ matrix floats
fn $dot(row: u32, t: u32, picks: u32) -> f32 {
  var total = 0.0;
  for (var k = 0u; k < picks; k++) {
    var sum = 0.0;
    for (var c = t; c < p.cols; c += 64u) {
      sum += $weight(row * p.cols + c) * bitcast<f32>(X[x_row(k) * p.x_words + c]);
    }
    terms[t] = sum;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half >>= 1u) {
      if (t < half) { terms[t] += terms[t + half]; }
      workgroupBarrier();
    }
    if (t == k) { total = terms[0]; }
    workgroupBarrier();
  }
  return total;
}

//@ format 0
fn $weight(i: u32) -> f32 {
  return bitcast<f32>($W[i]);
}

//@ format 1
fn $weight(i: u32) -> f32 {
  let both = unpack2x16float($W[i >> 1u]);
  return select(both.x, both.y, (i & 1u) == 1u);
}

//@ format 8
const $COLS = 32u;
const $BYTES = 34u;
fn $unpack(block: u32, j: u32) {
  for (var i = 0u; i < 8u; i++) { $q[i] = $word(block + 2u + 4u * i); }
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($dots(x, 0u, 8u), 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block) * dx) * i;
}

//@ format 12
const $COLS = 256u;
const $BYTES = 144u;
var<private> $scale: i32;
var<private> $minimum: i32;
fn $unpack(block: u32, j: u32) {
  let nibbles = block + 16u + 32u * (j >> 1u);
  for (var i = 0u; i < 8u; i++) { $q[i] = ($word(nibbles + 4u * i) >> (4u * (j & 1u))) & 0x0f0f0f0fu; }
  let s = block + 4u;
  if (j < 4u) {
    $scale = i32($byte(s + j) & 63u);
    $minimum = i32($byte(s + j + 4u) & 63u);
  } else {
    $scale = i32(($byte(s + j + 4u) & 15u) | (($byte(s + j - 4u) >> 6u) << 4u));
    $minimum = i32(($byte(s + j + 4u) >> 4u) | (($byte(s + j) >> 6u) << 4u));
  }
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($scale * $dots(x, 0u, 8u), $minimum * $sum(x, 0u, 8u));
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block) * dx) * i - ($half(block + 2u) * dx) * m;
}

//@ format 14
const $COLS = 256u;
const $BYTES = 210u;
var<private> $scales: vec2<i32>;
fn $signed(at: u32) -> i32 {
  return extractBits(bitcast<i32>($byte(at)), 0u, 8u);
}
fn $unpack(block: u32, j: u32) {
  let h = j >> 2u;   // half of the block; g: a quarter of it, 32 columns
  let g = j & 3u;
  for (var i = 0u; i < 8u; i++) {
    let low = ($word(block + 64u * h + 32u * (g & 1u) + 4u * i) >> (4u * (g >> 1u))) & 0x0f0f0f0fu;
    let high = ($word(block + 128u + 32u * h + 4u * i) >> (2u * g)) & 0x03030303u;
    $q[i] = low | (high << 4u);
  }
  $scales = vec2<i32>($signed(block + 192u + 2u * j), $signed(block + 193u + 2u * j));
}
fn $sub(x: u32) -> vec2<i32> {
  let a = $dots(x, 0u, 4u) - 32 * $sum(x, 0u, 4u);
  let b = $dots(x, 4u, 4u) - 32 * $sum(x, 4u, 4u);
  return vec2<i32>($scales.x * a + $scales.y * b, 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block + 208u) * dx) * i;
}

//@ format 39
const $COLS = 32u;
const $BYTES = 17u;
fn $level(code: u32) -> u32 {   // the magnitudes 0 1 2 3 4 6 8 12, with their sign, as a byte
  let size = (array<u32, 2>(0x03020100u, 0x0c080604u)[(code >> 2u) & 1u] >> (8u * (code & 3u))) & 0xffu;
  return select(size, (256u - size) & 0xffu, (code & 8u) != 0u);
}
fn $unpack(block: u32, j: u32) {
  for (var i = 0u; i < 4u; i++) {
    let codes = $word(block + 1u + 4u * i);
    var low = 0u;
    var high = 0u;
    for (var k = 0u; k < 4u; k++) {
      let both = (codes >> (8u * k)) & 0xffu;
      low |= $level(both & 15u) << (8u * k);
      high |= $level(both >> 4u) << (8u * k);
    }
    $q[i] = low;
    $q[4u + i] = high;
  }
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($dots(x, 0u, 8u), 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {   // 2^(e - 128); below 2^-126 a device may flush it
  let e = $byte(block);
  let d = bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u));
  return (d * dx) * i;
}

//@ hidden
@group(0) @binding(0) var<storage, read> gate_W: array<u32>;
@group(0) @binding(1) var<storage, read> up_W: array<u32>;
@group(0) @binding(2) var<storage, read> X: array<u32>;
@group(0) @binding(3) var<storage, read> row_of: array<u32>;       // [picks] row of X
@group(0) @binding(4) var<storage, read_write> H: array<f32>;      // [picks, rows]
@group(0) @binding(5) var<uniform> p: Params;
var<private> tile: u32;

fn x_row(k: u32) -> u32 {
  return row_of[p.first_pick + tile + k];
}
fn blocks_of_x() -> u32 {
  return p.cols / p.x_block;
}
fn exp_poly(x: f32) -> f32 {   // the contract's, since the built-in one may be far off
  let n = round(x * 1.44269502162933349609375);
  var r = x - n * 0.693359375;
  r = r - n * -0.000212194441701285541057586669921875;
  var e = 0.000198756912141107022762298583984375;
  e = e * r + 0.00139819993637502193450927734375;
  e = e * r + 0.008333452045917510986328125;
  e = e * r + 0.0416657961905002593994140625;
  e = e * r + 0.1666666567325592041015625;
  e = e * r + 0.5;
  return ((e * (r * r) + r) + 1.0) * bitcast<f32>(u32(i32(n) + 127) << 23u);
}
fn silu(g: f32) -> f32 {
  if (g < -87.0) { return 0.0; }
  return g / (1.0 + exp_poly(-min(g, 87.0)));
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
  let row = group.y * p.width + group.x;
  if (row >= p.rows) { return; }
  let first = group.z * 4u;   // not `tile`: a private variable is not known to be the same for all threads
  let picks = min(4u, p.num_picks - first);
  tile = first;
  let g = gate_dot(row, t, picks);
  let u = up_dot(row, t, picks);
  if (t < picks) { H[(p.first_pick + tile + t) * p.rows + row] = silu(g) * u; }
}

//@ quantise
struct Params {
  cols: u32,
  block: u32,
  num_blocks: u32,   // of all picks
  width: u32,
}
@group(0) @binding(0) var<storage, read> H: array<f32>;
@group(0) @binding(1) var<storage, read_write> X: array<u32>;      // per pick: scales, then ints
@group(0) @binding(2) var<storage, read_write> bad: array<atomic<u32>>;
@group(0) @binding(3) var<uniform> p: Params;
var<workgroup> most: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
  let index = group.y * p.width + group.x;
  if (index >= p.num_blocks) { return; }
  let blocks = p.cols / p.block;
  let pick = index / blocks;
  let b = index % blocks;
  let from_ = pick * p.cols + b * p.block;
  var amax = 0.0;
  for (var c = t; c < p.block; c += 64u) {
    let h = H[from_ + c];
    if ((bitcast<u32>(h) & 0x7f800000u) == 0x7f800000u) { atomicOr(&bad[0], 1u); }
    amax = max(amax, abs(h));
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
  for (var w = t; w < p.block / 4u; w += 64u) {
    var word = 0u;
    for (var k = 0u; k < 4u; k++) {
      let q = clamp(i32(round(H[from_ + 4u * w + k] * inverse)), -127, 127);
      word |= (bitcast<u32>(q) & 0xffu) << (8u * k);
    }
    X[to + blocks + b * p.block / 4u + w] = word;
  }
}

//@ down
@group(0) @binding(0) var<storage, read> down_W: array<u32>;
@group(0) @binding(1) var<storage, read> X: array<u32>;            // one row per pick
@group(0) @binding(2) var<storage, read> weights: array<f32>;      // [picks]
@group(0) @binding(3) var<storage, read_write> P: array<f32>;      // [picks, rows]
@group(0) @binding(4) var<uniform> p: Params;
var<private> tile: u32;

fn x_row(k: u32) -> u32 {
  return p.first_pick + tile + k;
}
fn blocks_of_x() -> u32 {
  return p.cols / p.x_block;
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
  let row = group.y * p.width + group.x;
  if (row >= p.rows) { return; }
  let first = group.z * 4u;   // not `tile`: a private variable is not known to be the same for all threads
  let picks = min(4u, p.num_picks - first);
  tile = first;
  let o = down_dot(row, t, picks);
  if (t < picks) {
    let pick = p.first_pick + tile + t;
    P[pick * p.rows + row] = weights[pick] * o;
  }
}
