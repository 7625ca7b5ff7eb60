// Arrays of 16-bit floats to float32, as the compiler vectorises it.
//
// Included inside a namespace and under a target pragma, once for each instruction set.

void from_float16(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    // Moved into place, the exponent is too small by 112, also for subnormals; that of infinity and NaN stays largest.
    const uint32_t magnitude = uint32_t(from[i] & 0x7fff) << 13;
    float value;
    __builtin_memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    uint32_t raw;
    __builtin_memcpy(&raw, &value, sizeof raw);
    raw |= uint32_t(from[i] & 0x8000) << 16 | (magnitude >= 0x0f800000 ? 0x7f800000 : 0);
    __builtin_memcpy(to + i, &raw, sizeof raw);
  }
}

void from_bfloat16(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t raw = uint32_t(from[i]) << 16;
    __builtin_memcpy(to + i, &raw, sizeof raw);
  }
}
