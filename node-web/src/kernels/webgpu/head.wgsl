// What the stages `hidden` and `down` share. X: rows of activations, as words: the scales of the blocks, then the ints,
// four a word; or floats. One dispatch is one expert and one part of its rows.
struct Params {
  rows: u32,          // of this part of the weights
  first_row: u32,     // of it among all rows
  all_rows: u32,
  cols: u32,
  x_words: u32,       // of one row of X (hidden: as up wants it)
  x_block: u32,       // columns of one scale of X, 0 for floats
  gate_words: u32,    // the same for gate
  gate_block: u32,
  first_pick: u32,    // picks stand sorted by expert
  num_picks: u32,
  width: u32,         // workgroups beside one another in x; the rest stand in y
  flags: u32,         // the weight goes first 1, scaled 2, biased 4, the weight goes last 8
  activation: u32,    // enum expert_activation of wasm/expert.h
  bias_at: u32,       // where in `biases` those of up (or down) begin; gate's begin at 0
  scale: f32,         // of up or down
  gate_scale: f32,
  alpha: f32,
  limit: f32,
  inverse_alpha: f32,
  inverse_limit: f32,
}
const TILE = 8u;      // picks that read a row of weights together
const BAD = 0x7fc00000u;
var<workgroup> whole: array<i32, 512>;   // [64 threads][TILE]: the part of a term with the scale
var<workgroup> lows: array<i32, 512>;    // the part with the minimum
var<workgroup> terms: array<f32, 512>;

// Each of four codes 0..15 (the low nibbles of the bytes) to its byte of the table.
fn looked_up(codes: u32, table: vec4<u32>) -> u32 {
  var bytes = 0u;
  for (var k = 0u; k < 32u; k += 8u) {
    let code = (codes >> k) & 15u;
    let pair = select(table.xy, table.zw, code > 7u);
    let word = select(pair.x, pair.y, (code & 4u) != 0u);
    bytes |= ((word >> (8u * (code & 3u))) & 0xffu) << k;
  }
  return bytes;
}
// Four bits to bit `to` of four bytes.
fn spread(bits: u32, to: u32) -> u32 {
  return ((bits & 1u) | ((bits & 2u) << 7u) | ((bits & 4u) << 14u) | ((bits & 8u) << 21u)) << to;
}
fn finite(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}
// CONTRACT.md, "Finishing a product".
fn finished(product: f32, weight: f32, scale: f32, bias: f32) -> f32 {
  var y = product;
  if ((p.flags & 1u) != 0u) { y = weight * y; }
  if ((p.flags & 2u) != 0u) { y = scale * y; }
  if ((p.flags & 4u) != 0u) { y = y + bias; }
  return y;
}
