// Dot of one row of floats with up to TILE rows of X; the result for pick k is thread k's.
fn $dot(row: u32, t: u32, picks: u32) -> f32 {
  var total = 0.0;
  for (var k = 0u; k < picks; k++) {
    var sum = 0.0;
    for (var c = t; c < p.cols; c += 64u) {
      sum += $weight(row * p.cols + c) * bitcast<f32>($X[$x_row(k) * $x_words() + c]);
    }
    terms[t] = sum;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half >>= 1u) {
      if (t < half) { terms[t] += terms[t + half]; }
      workgroupBarrier();
    }
    if (t == k) { total = terms[0]; }
    workgroupBarrier();
  }
  return total;
}
