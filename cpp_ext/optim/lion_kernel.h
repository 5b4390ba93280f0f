// Lion (Chen et al. 2023, algorithm 2) on one row. State is [momentum (dim)].
// Included inside an ISA namespace (kernels.h).

struct LionKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict buffer = row.state;
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const Decay decay(params);
    const auto take1 = static_cast<float>(1.0 - params.beta1);
    const auto take2 = static_cast<float>(1.0 - params.beta2);
    const float scale = params.grad_scale, lr = params.lr;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float stored = Weights::load(weights[i]);
      const float grad = decay.gradient(grads[i] * scale, stored);
      const float weight = decay.weight(stored);
      const float moved = buffer[i] + (grad - buffer[i]) * take1;
      const float sign = (moved > 0.0f ? 1.0f : 0.0f) - (moved < 0.0f ? 1.0f : 0.0f);
      buffer[i] = buffer[i] + (grad - buffer[i]) * take2;
      weights[i] = Weights::store(weight - lr * sign, rounding, i);
    }
  }
};
