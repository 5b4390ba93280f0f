// Adagrad (Duchi, Hazan & Singer 2011), as torch.optim.Adagrad on one row, and its row-wise form, which
// keeps one accumulator per row, of the mean of squares over columns (Mudigere et al. 2022, section 4.1.1).
// Included inside an ISA namespace (kernels.h).

struct AdagradKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict sums = row.state;
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const float scale = params.grad_scale, decay = params.weight_decay, lr = params.lr, eps = params.eps;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float weight = Weights::load(weights[i]);
      const float grad = grads[i] * scale + decay * weight;
      const float sum = sums[i] + grad * grad;
      sums[i] = sum;
      weights[i] = Weights::store(weight - lr * (grad / (__builtin_sqrtf(sum) + eps)), rounding, i);
    }
  }
};

struct RowWiseAdagradKernel {
  static constexpr std::uint32_t kLanes = 16;  // partial sums, in the same order on every instruction set

  template <class Weights>
  static float mean_square(const typename Weights::Element* weights, const float* grads,
                           const KernelParams& params) noexcept {
    const float scale = params.grad_scale, decay = params.weight_decay;
    const std::uint32_t whole = params.dim / kLanes * kLanes;
    float partial[kLanes] = {};
    for (std::uint32_t i = 0; i < whole; i += kLanes) {
      for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
        const float grad = grads[i + lane] * scale + decay * Weights::load(weights[i + lane]);
        partial[lane] += grad * grad;
      }
    }
    for (std::uint32_t i = whole; i < params.dim; ++i) {
      const float grad = grads[i] * scale + decay * Weights::load(weights[i]);
      partial[i - whole] += grad * grad;
    }
    for (std::uint32_t half = kLanes / 2; half > 0; half /= 2) {
      for (std::uint32_t lane = 0; lane < half; ++lane) partial[lane] += partial[lane + half];
    }
    return partial[0] / static_cast<float>(params.dim);
  }

  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const float sum = row.state[0] + mean_square<Weights>(weights, grads, params);
    row.state[0] = sum;
    const float scale = params.grad_scale, decay = params.weight_decay, lr = params.lr;
    const float denominator = __builtin_sqrtf(sum) + params.eps;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float weight = Weights::load(weights[i]);
      const float grad = grads[i] * scale + decay * weight;
      weights[i] = Weights::store(weight - lr * (grad / denominator), rounding, i);
    }
  }
};
