// SGD, as torch.optim.SGD on one row; included inside an ISA namespace (kernels.h).

struct SgdKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const Decay decay(params);
    const float scale = params.grad_scale, lr = params.lr;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float stored = Weights::load(weights[i]);
      const float grad = decay.gradient(grads[i] * scale, stored);
      const float weight = decay.weight(stored);
      weights[i] = Weights::store(weight - lr * grad, rounding, i);
    }
  }
};

// The momentum buffer is the gradient itself at a row's first update, as in torch.
struct SgdMomentumKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict buffer = row.state;
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const bool is_first = row.update_count == 1;
    const Decay decay(params);
    const float scale = params.grad_scale, lr = params.lr;
    const float keep = is_first ? 0.0f : params.momentum;
    const float take = is_first ? 1.0f : 1.0f - params.dampening;
    const float ahead = params.nesterov ? params.momentum : 0.0f;
    const float own = params.nesterov ? 1.0f : 0.0f;
    const float past = params.nesterov ? ahead : 1.0f;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float stored = Weights::load(weights[i]);
      const float grad = decay.gradient(grads[i] * scale, stored);
      const float weight = decay.weight(stored);
      const float moved = keep * buffer[i] + take * grad;
      buffer[i] = moved;
      weights[i] = Weights::store(weight - lr * (own * grad + past * moved), rounding, i);
    }
  }
};
