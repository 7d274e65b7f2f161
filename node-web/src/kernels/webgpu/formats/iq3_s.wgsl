// IQ3_S, 256 columns in 110 bytes: d f16 at 0, 64 points at 2, their ninth bits at 66, signs at 74, 8 scales at 106.
const $COLS = 256u;
const $BYTES = 110u;
fn $unpack(block: u32, j: u32) {
  let ninth = $byte(block + 66u + j);
  for (var k = 0u; k < 8u; k++) {
    let point = $byte(block + 2u + 8u * j + k) | (((ninth >> k) & 1u) << 8u);
    let signs = $byte(block + 74u + 4u * j + (k >> 1u)) >> (4u * (k & 1u));
    $q[k] = with_signs(grids[IQ3_S + point], signs);
  }
  $two_scales((($byte(block + 106u + (j >> 1u)) >> (4u * (j & 1u))) & 15u) * 17u);
}
fn $sub(x: u32) -> vec2<i32> {
  return $two_dots(x);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block) * dx) * i;
}
