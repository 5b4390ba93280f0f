// What several optimizers compute alike; included inside an ISA namespace (kernels.h).

// base^exponent by repeated squaring: the same bits on every machine, unlike libm's pow.
static double power(double base, std::uint32_t exponent) noexcept {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1u) result *= base;
    base *= base;
  }
  return result;
}

// The sum of a term over columns, in partial sums of one order on every instruction set.
template <class Term>
static float sum_columns(std::uint32_t dim, Term term) noexcept {
  constexpr std::uint32_t kLanes = 16;
  const std::uint32_t whole = dim / kLanes * kLanes;
  float partial[kLanes] = {};
  for (std::uint32_t i = 0; i < whole; i += kLanes) {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) partial[lane] += term(i + lane);
  }
  for (std::uint32_t i = whole; i < dim; ++i) partial[i - whole] += term(i);
  for (std::uint32_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::uint32_t lane = 0; lane < half; ++lane) partial[lane] += partial[lane + half];
  }
  return partial[0];
}

// Weight decay. Coupled, it is a part of the gradient (L2); decoupled, it multiplies the weights by 1 - lr * decay
// before the step, as torch.optim.AdamW does (Loshchilov & Hutter 2019). The other form multiplies by 0 or by 1.
class Decay {
 public:
  explicit Decay(const KernelParams& params) noexcept
      : added_(params.decoupled ? 0.0f : params.weight_decay),
        kept_(params.decoupled
                  ? static_cast<float>(1.0 - static_cast<double>(params.lr) * static_cast<double>(params.weight_decay))
                  : 1.0f) {}

  float gradient(float scaled, float stored) const noexcept { return scaled + added_ * stored; }
  float weight(float stored) const noexcept { return kept_ * stored; }

 private:
  float added_;
  float kept_;
};
