// IQ3_XXS, 256 columns in 98 bytes: d f16 at 0, 64 points of 4 columns at 2, four times seven signs and a scale each at 66.
const $COLS = 256u;
const $BYTES = 98u;
fn $unpack(block: u32, j: u32) {
  let rest = $word(block + 66u + 4u * j);
  for (var k = 0u; k < 8u; k++) {
    let signs = eight_signs(rest >> (7u * (k >> 1u))) >> (4u * (k & 1u));
    $q[k] = with_signs(grids[IQ3_XXS + $byte(block + 2u + 8u * j + k)], signs);
  }
  $two_scales((rest >> 28u) * 17u);
}
fn $sub(x: u32) -> vec2<i32> {
  return $two_dots(x);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return (($half(block) * 0.25) * dx) * i;
}
