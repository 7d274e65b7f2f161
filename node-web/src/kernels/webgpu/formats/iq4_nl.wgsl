// IQ4_NL, 32 columns in 18 bytes: d f16 at 0, nibbles at 2 that name levels.
const $COLS = 32u;
const $BYTES = 18u;
fn $unpack(block: u32, j: u32) {
  $nibbles(block + 2u);
  $look_up(vec4<u32>(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u));
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($dots(x, 0u, 8u), 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block) * dx) * i;
}
