// Definitions of TileKernels for one instruction set, as the compiler vectorises them: told that nothing overlaps, for it
// does not compare so many pointers. Included inside a namespace and under a target pragma; see tiles_cpu.cpp.

void features(const float* const* first, const float* const* second, float sign, int64_t channels,
              float* const* tiles) {
  const float *a0 = first[0], *a1 = first[1], *a2 = first[2], *a3 = first[3];
  const float *b0 = second[0], *b1 = second[1], *b2 = second[2], *b3 = second[3];
  float* __restrict t0 = tiles[0];
  float* __restrict t1 = tiles[1];
  float* __restrict t2 = tiles[2];
  float* __restrict t3 = tiles[3];
#pragma GCC ivdep
  for (int64_t c = 0; c < channels; ++c) {
    const float e0 = a0[c] + sign * b0[c], e1 = a1[c] + sign * b1[c];
    const float e2 = a2[c] + sign * b2[c], e3 = a3[c] + sign * b3[c];
    t0[c] = e0 - e2;
    t1[c] = e1 + e2;
    t2[c] = e2 - e1;
    t3[c] = e1 - e3;
  }
}

void gradients(const float* const* first, const float* const* second, float first_sign, float second_sign,
               int64_t channels, float* const* tiles) {
  const float *a0 = first[0], *a1 = first[1], *b0 = second[0], *b1 = second[1];
  float* __restrict t0 = tiles[0];
  float* __restrict t1 = tiles[1];
  float* __restrict t2 = tiles[2];
  float* __restrict t3 = tiles[3];
#pragma GCC ivdep
  for (int64_t c = 0; c < channels; ++c) {
    const float e0 = first_sign * a0[c] + second_sign * b0[c], e1 = first_sign * a1[c] + second_sign * b1[c];
    t0[c] = e0;
    t1[c] = e0 + e1;
    t2[c] = e0 - e1;
    t3[c] = -e1;
  }
}

void results(const float* const* tiles, float sign, bool add, bool relu, int64_t channels, float* const* results) {
  const float *t0 = tiles[0], *t1 = tiles[1], *t2 = tiles[2], *t3 = tiles[3];
  float* __restrict r0 = results[0];
  float* __restrict r1 = results[1];
  // NaN is not below 0, so it stays.
  const auto finished = [relu](float value) { return relu && value < 0.0f ? 0.0f : value; };
  if (add) {
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; ++c) {
      r0[c] = finished(r0[c] + sign * (t0[c] + (t1[c] + t2[c])));
      r1[c] = finished(r1[c] + sign * ((t1[c] - t2[c]) - t3[c]));
    }
  } else {
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; ++c) {
      r0[c] = sign * (t0[c] + (t1[c] + t2[c]));
      r1[c] = sign * ((t1[c] - t2[c]) - t3[c]);
    }
  }
}

const TileKernels kernels = {kName, features, gradients, results};
