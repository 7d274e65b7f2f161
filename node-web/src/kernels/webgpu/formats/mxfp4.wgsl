// MXFP4, 32 columns in 17 bytes: an exponent at 0, nibbles at 1 that name levels (e2m1 doubled).
const $COLS = 32u;
const $BYTES = 17u;
fn $unpack(block: u32, j: u32) {
  $nibbles(block + 1u);
  $look_up(vec4<u32>(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu));
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($dots(x, 0u, 8u), 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {   // 2^(e - 128); below 2^-126 a device may flush it
  let e = $byte(block);
  let d = bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u));
  return (d * dx) * i;
}
