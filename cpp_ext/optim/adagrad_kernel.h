// Adagrad (Duchi, Hazan & Singer 2011), as torch.optim.Adagrad on one row, and its row-wise form, which
// keeps one accumulator per row, of the mean of squares over columns (Mudigere et al. 2022, section 4.1.1).
// accumulator_decay multiplies the accumulator before each sum; torch has no such option.
// Included inside an ISA namespace (kernels.h).

struct AdagradKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict sums = row.state;
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const Decay decay(params);
    const float scale = params.grad_scale, lr = params.lr, eps = params.eps, keep = params.accumulator_decay;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float stored = Weights::load(weights[i]);
      const float grad = decay.gradient(grads[i] * scale, stored);
      const float weight = decay.weight(stored);
      const float sum = keep * sums[i] + grad * grad;
      sums[i] = sum;
      weights[i] = Weights::store(weight - lr * (grad / (__builtin_sqrtf(sum) + eps)), rounding, i);
    }
  }
};

struct RowWiseAdagradKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const Decay decay(params);
    const float scale = params.grad_scale, lr = params.lr;
    const auto gradient = [=](std::uint32_t i) { return decay.gradient(grads[i] * scale, Weights::load(weights[i])); };
    const float squares = sum_columns(params.dim, [=](std::uint32_t i) { return gradient(i) * gradient(i); });
    const float sum = params.accumulator_decay * row.state[0] + squares / static_cast<float>(params.dim);
    row.state[0] = sum;
    const float denominator = __builtin_sqrtf(sum) + params.eps;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float weight = decay.weight(Weights::load(weights[i]));
      weights[i] = Weights::store(weight - lr * (gradient(i) / denominator), rounding, i);
    }
  }
};
