// IQ4_XS, 256 columns in 136 bytes: d f16 at 0, upper bits of the scales at 2, lower at 4, nibbles at 8 that name levels.
const $COLS = 256u;
const $BYTES = 136u;
fn $unpack(block: u32, j: u32) {
  $nibbles(block + 8u + 16u * j);
  $look_up(vec4<u32>(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u));
  let low = ($word(block + 4u) >> (4u * j)) & 15u;
  let high = ($byte(block + 2u + (j >> 2u)) >> (2u * (j & 3u))) & 3u;
  $scales = vec4<i32>(i32(low | (high << 4u)) - 32, 0, 0, 0);
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($scales.x * $dots(x, 0u, 8u), 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block) * dx) * i;
}
