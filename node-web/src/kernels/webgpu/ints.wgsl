// Dot of one row of blocks with up to TILE rows of X; the result for pick k is thread k's. A thread takes 32 columns, in
// integers; then one float term per block; then the terms in their order.
fn $dot(row: u32, t: u32, picks: u32) -> f32 {
  let at = row * (p.cols / $COLS) * $BYTES;
  let subs = p.cols / 32u;
  let blocks = p.cols / $COLS;
  let per_block = $COLS / 32u;
  let x_blocks = p.cols / $x_block();
  var total = 0.0;
  for (var base = 0u; base < subs; base += 64u) {
    let s = base + t;
    if (s < subs) {
      $unpack(at + s / per_block * $BYTES, s % per_block);
      for (var k = 0u; k < picks; k++) {
        let both = $sub($x_row(k) * $x_words() + x_blocks + s * 8u);
        whole[t * TILE + k] = both.x;
        lows[t * TILE + k] = both.y;
      }
    }
    workgroupBarrier();
    let b = base / per_block + t;
    if (t < 64u / per_block && b < blocks) {
      for (var k = 0u; k < picks; k++) {
        var i = 0;
        var m = 0;
        for (var j = 0u; j < per_block; j++) {
          i += whole[(t * per_block + j) * TILE + k];
          m += lows[(t * per_block + j) * TILE + k];
        }
        let dx = bitcast<f32>($X[$x_row(k) * $x_words() + b * $COLS / $x_block()]);
        terms[t * TILE + k] = $term(at + b * $BYTES, dx, f32(i), f32(m));
      }
    }
    workgroupBarrier();
    if (t < picks) {
      let n = min(64u / per_block, blocks - base / per_block);
      for (var j = 0u; j < n; j++) { total = total + terms[j * TILE + t]; }
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
fn $signed(at: u32) -> i32 {
  return extractBits(bitcast<i32>($byte(at)), 0u, 8u);
}
var<private> $q: array<u32, 8>;   // 32 weights, four a word, as signed bytes
var<private> $scales: vec4<i32>;  // of their sub-blocks, and minimums

fn $dots(x: u32, first: u32, count: u32) -> i32 {
  var sum = 0;
  for (var i = first; i < first + count; i++) { sum += dot4($q[i], $X[x + i]); }
  return sum;
}
fn $sum(x: u32, first: u32, count: u32) -> i32 {
  var sum = 0;
  for (var i = first; i < first + count; i++) { sum += dot4(0x01010101u, $X[x + i]); }
  return sum;
}
// 16 bytes to the weights they hold as nibbles: low ones first.
fn $nibbles(at: u32) {
  for (var i = 0u; i < 4u; i++) {
    let both = $word(at + 4u * i);
    $q[i] = both & 0x0f0f0f0fu;
    $q[4u + i] = (both >> 4u) & 0x0f0f0f0fu;
  }
}
fn $fifth_bits(bits: u32) {
  for (var i = 0u; i < 8u; i++) { $q[i] |= spread(bits >> (4u * i), 4u); }
}
fn $look_up(table: vec4<u32>) {
  for (var i = 0u; i < 8u; i++) { $q[i] = looked_up($q[i], table); }
}
// 64 bytes at `at`: half h of a block has 32 of them, and their bits 2g, 2g + 1 are 32 columns.
fn $two_bits(at: u32, j: u32) {
  for (var i = 0u; i < 8u; i++) {
    $q[i] = ($word(at + 32u * (j >> 2u) + 4u * i) >> (2u * (j & 3u))) & 0x03030303u;
  }
}
// Twelve bytes of scales and minimums, six bits each, as Q4_K and Q5_K have them.
fn $scale_and_minimum(s: u32, j: u32) {
  if (j < 4u) {
    $scales = vec4<i32>(i32($byte(s + j) & 63u), i32($byte(s + j + 4u) & 63u), 0, 0);
  } else {
    $scales = vec4<i32>(
      i32(($byte(s + j + 4u) & 15u) | (($byte(s + j - 4u) >> 6u) << 4u)),
      i32(($byte(s + j + 4u) >> 4u) | (($byte(s + j) >> 6u) << 4u)), 0, 0);
  }
}
// Scales of the two halves of 32 columns, from a byte with a nibble for each; as the IQ formats mean them.
fn $two_scales(code: u32) {
  $scales = vec4<i32>(i32(2u * (code & 15u) + 1u), i32(2u * (code >> 4u) + 1u), 0, 0);
}
fn $two_dots(x: u32) -> vec2<i32> {
  return vec2<i32>($scales.x * $dots(x, 0u, 4u) + $scales.y * $dots(x, 4u, 4u), 0);
}
