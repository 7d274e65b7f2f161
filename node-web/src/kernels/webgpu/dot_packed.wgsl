// Four signed bytes times four: where the language has the instruction and the hardware does, too.
fn dot4(a: u32, b: u32) -> i32 {
  return dot4I8Packed(a, b);
}
