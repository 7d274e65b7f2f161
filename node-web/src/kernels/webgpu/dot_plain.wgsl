// Four signed bytes times four, for languages without the instruction and hardware that would imitate it.
fn dot4(a: u32, b: u32) -> i32 {
  let x = bitcast<i32>(a);
  let y = bitcast<i32>(b);
  return extractBits(x, 0u, 8u) * extractBits(y, 0u, 8u) + extractBits(x, 8u, 8u) * extractBits(y, 8u, 8u)
    + extractBits(x, 16u, 8u) * extractBits(y, 16u, 8u) + extractBits(x, 24u, 8u) * extractBits(y, 24u, 8u);
}
