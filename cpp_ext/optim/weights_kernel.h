// Loads and stores of stored weights inside kernels; included inside an ISA namespace (kernels.h).
//
// Stored bfloat16 and float16 are rounded stochastically: up with the probability of the dropped
// fraction, so that the expected stored value is the exact one and updates smaller than half a unit
// are not lost on average. The random bits are a pure function of (seed, table, key, update count, column).

struct Rounding {
  std::uint32_t low;
  std::uint32_t high;

  Rounding(const KernelParams& params, const RowUpdate& update) noexcept {
    const std::uint64_t bits = mix_bits(params.rounding_seed ^ mix_bits(update.key + update.update_count * kGolden));
    low = static_cast<std::uint32_t>(bits);
    high = static_cast<std::uint32_t>(bits >> 32);
  }

  // 32 random bits of a column: two rounds of multiply and shift, in 32 bits so that they vectorise.
  std::uint32_t bits(std::uint32_t column) const noexcept {
    std::uint32_t x = low + column * 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + high) * 0x846ca68bu;
    return x ^ (x >> 16);
  }

  static constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ull;
};

struct Float32Weights {
  using Element = float;
  static float load(float stored) noexcept { return stored; }
  static float store(float value, const Rounding&, std::uint32_t) noexcept { return value; }
};

struct BFloat16Weights {
  using Element = std::uint16_t;
  static float load(std::uint16_t stored) noexcept {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(stored) << 16);
  }
  static std::uint16_t store(float value, const Rounding& rounding, std::uint32_t column) noexcept {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t rounded = bits + (rounding.bits(column) & 0xffffu);
    const bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
    const std::uint32_t special = bits | ((bits & 0x7fffffu) != 0 ? 0x400000u : 0u);  // a NaN stays one
    return static_cast<std::uint16_t>((is_finite ? rounded : special) >> 16);
  }
};

struct Float16Weights {
  using Element = std::uint16_t;
  static float load(std::uint16_t stored) noexcept {
    const std::uint32_t sign = (stored & 0x8000u) << 16;
    const std::uint32_t magnitude = stored & 0x7fffu;
    const std::uint32_t normal = (magnitude << 13) + (112u << 23);
    const std::uint32_t tiny =
        __builtin_bit_cast(std::uint32_t, static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
    const std::uint32_t special = (magnitude << 13) | 0x7f800000u;
    const std::uint32_t finite = magnitude < 0x400u ? tiny : normal;
    return __builtin_bit_cast(float, sign | (magnitude < 0x7c00u ? finite : special));
  }
  static std::uint16_t store(float value, const Rounding& rounding, std::uint32_t column) noexcept {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t noise = rounding.bits(column) & 0x1fffu;
    const std::uint32_t normal = ((magnitude + noise) >> 13) - (112u << 10);
    // Below 2^-14 the unit is 2^-24 whatever the exponent: count units in fixed point of 13 more bits.
    const float tiny_magnitude = __builtin_bit_cast(float, magnitude < 0x38800000u ? magnitude : 0u);
    const auto units = static_cast<std::uint32_t>(static_cast<std::int32_t>(tiny_magnitude * 0x1p37f));
    const std::uint32_t tiny = (units + noise) >> 13;
    const std::uint32_t finite = magnitude < 0x38800000u ? tiny : (normal < 0x7c00u ? normal : 0x7c00u);
    const std::uint32_t half = magnitude > 0x7f800000u ? 0x7e00u : (magnitude < 0x47800000u ? finite : 0x7c00u);
    return static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u));
  }
};
