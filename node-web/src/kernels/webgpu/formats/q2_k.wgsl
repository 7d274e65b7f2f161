// Q2_K, 256 columns in 84 bytes: 16 bytes of scale and minimum at 0, pairs of bits at 16, d, dmin f16 at 80.
const $COLS = 256u;
const $BYTES = 84u;
fn $unpack(block: u32, j: u32) {
  $two_bits(block + 16u, j);
  let a = i32($byte(block + 2u * j));
  let b = i32($byte(block + 2u * j + 1u));
  $scales = vec4<i32>(a & 15, b & 15, a >> 4u, b >> 4u);
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>(
    $scales.x * $dots(x, 0u, 4u) + $scales.y * $dots(x, 4u, 4u),
    $scales.z * $sum(x, 0u, 4u) + $scales.w * $sum(x, 4u, 4u));
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block + 80u) * dx) * i - ($half(block + 82u) * dx) * m;
}
