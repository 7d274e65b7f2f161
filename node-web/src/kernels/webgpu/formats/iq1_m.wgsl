// IQ1_M, 256 columns in 56 bytes: 32 points at 0, their upper bits and deltas at 32; at 48 four times four scales of three
// bits and a quarter of d.
const $COLS = 256u;
const $BYTES = 56u;
fn $unpack(block: u32, j: u32) {
  for (var k = 0u; k < 4u; k++) {
    let upper = ($byte(block + 32u + 2u * j + (k >> 1u)) >> (4u * (k & 1u))) & 15u;
    let point = $byte(block + 4u * j + k) | ((upper & 7u) << 8u);
    $q[2u * k] = iq1_levels(point, 0u, upper >> 3u);
    $q[2u * k + 1u] = iq1_levels(point, 1u, upper >> 3u);
  }
  let at = block + 48u + 2u * (j >> 1u);
  let scales = ($byte(at) | ($byte(at + 1u) << 8u)) >> (6u * (j & 1u));
  $two_scales((scales & 7u) | (((scales >> 3u) & 7u) << 4u));
}
fn $sub(x: u32) -> vec2<i32> {
  return $two_dots(x);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  var d = 0u;
  for (var k = 0u; k < 4u; k++) { d |= ($byte(block + 49u + 2u * k) >> 4u) << (4u * k); }
  return ((unpack2x16float(d).x * 0.125) * dx) * i;
}
