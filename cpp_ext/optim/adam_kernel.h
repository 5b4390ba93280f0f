// Adam (Kingma & Ba 2015, algorithm 1), as torch.optim.Adam on one row: t is the row's own update count.
// State is [first moment (dim)][second moment (dim)]. Included inside an ISA namespace (kernels.h).

struct AdamKernel {
  // base^exponent by repeated squaring: the same bits on every machine, unlike libm's pow.
  static double power(double base, std::uint32_t exponent) noexcept {
    double result = 1.0;
    for (; exponent != 0; exponent >>= 1) {
      if (exponent & 1u) result *= base;
      base *= base;
    }
    return result;
  }

  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict first = row.state;
    float* __restrict second = row.state + params.dim;
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const double correction1 = 1.0 - power(params.beta1, row.update_count);
    const double correction2 = 1.0 - power(params.beta2, row.update_count);
    const auto step = static_cast<float>(static_cast<double>(params.lr) / correction1);
    const auto root = static_cast<float>(__builtin_sqrt(correction2));
    const auto take1 = static_cast<float>(1.0 - params.beta1);
    const auto keep2 = static_cast<float>(params.beta2);
    const auto take2 = static_cast<float>(1.0 - params.beta2);
    const float scale = params.grad_scale, decay = params.weight_decay, eps = params.eps;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float weight = Weights::load(weights[i]);
      const float grad = grads[i] * scale + decay * weight;
      const float moment1 = first[i] + (grad - first[i]) * take1;
      const float moment2 = keep2 * second[i] + take2 * (grad * grad);
      first[i] = moment1;
      second[i] = moment2;
      weights[i] = Weights::store(weight - step * (moment1 / (__builtin_sqrtf(moment2) / root + eps)), rounding, i);
    }
  }
};
