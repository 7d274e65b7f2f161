// NVFP4, 64 columns in 36 bytes: four e4m3 scales at 0, nibbles at 4; 8 bytes are 16 columns. Seen as two blocks of 32
// columns in 18 bytes: the scales of both stand at the first.
const $COLS = 32u;
const $BYTES = 18u;
fn $unpack(block: u32, j: u32) {
  let whole_at = block - block % 36u;
  let at = whole_at + 4u + 16u * (block % 36u / 18u);
  for (var i = 0u; i < 2u; i++) {
    let a = $word(at + 8u * i);
    let b = $word(at + 8u * i + 4u);
    $q[4u * i] = a & 0x0f0f0f0fu;
    $q[4u * i + 1u] = b & 0x0f0f0f0fu;
    $q[4u * i + 2u] = (a >> 4u) & 0x0f0f0f0fu;
    $q[4u * i + 3u] = (b >> 4u) & 0x0f0f0f0fu;
  }
  $look_up(vec4<u32>(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu));
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($dots(x, 0u, 4u), $dots(x, 4u, 4u));
}
fn $e4m3(code: u32) -> f32 {
  let e = (code >> 3u) & 15u;
  let m = f32(code & 7u);
  let power = bitcast<f32>((max(e, 1u) + 116u) << 23u);   // 2^(e - 11), 2^-10 when e is 0
  return select(select(m, m + 8.0, e > 0u) * power, 0.0, code == 0x7fu);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  let at = block - block % 36u + 2u * (block % 36u / 18u);
  return ($e4m3($byte(at)) * dx) * i + ($e4m3($byte(at + 1u)) * dx) * m;
}
