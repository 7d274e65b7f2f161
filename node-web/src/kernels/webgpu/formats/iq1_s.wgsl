// IQ1_S, 256 columns in 50 bytes: d f16 at 0, 32 points at 2; at 34, for 32 columns, their upper bits, a scale, a delta.
const $COLS = 256u;
const $BYTES = 50u;
fn $unpack(block: u32, j: u32) {
  let rest = $byte(block + 34u + 2u * j) | ($byte(block + 35u + 2u * j) << 8u);
  for (var k = 0u; k < 4u; k++) {
    let point = $byte(block + 2u + 4u * j + k) | (((rest >> (3u * k)) & 7u) << 8u);
    $q[2u * k] = iq1_levels(point, 0u, rest >> 15u);
    $q[2u * k + 1u] = iq1_levels(point, 1u, rest >> 15u);
  }
  $two_scales(((rest >> 12u) & 7u) * 17u);
}
fn $sub(x: u32) -> vec2<i32> {
  return $two_dots(x);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return (($half(block) * 0.125) * dx) * i;
}
