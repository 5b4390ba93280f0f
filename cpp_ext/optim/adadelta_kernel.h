// Adadelta (Zeiler 2012, algorithm 1), as torch.optim.Adadelta on one row.
// State is [mean square of gradients (dim)][mean square of steps (dim)]. Included inside an ISA namespace (kernels.h).

struct AdadeltaKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict squares = row.state;
    float* __restrict steps = row.state + params.dim;
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const Decay decay(params);
    const auto keep = static_cast<float>(params.rho);
    const auto take = static_cast<float>(1.0 - params.rho);
    const float scale = params.grad_scale, lr = params.lr, eps = params.eps;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float stored = Weights::load(weights[i]);
      const float grad = decay.gradient(grads[i] * scale, stored);
      const float weight = decay.weight(stored);
      const float square = keep * squares[i] + take * (grad * grad);
      const float step = __builtin_sqrtf(steps[i] + eps) / __builtin_sqrtf(square + eps) * grad;
      squares[i] = square;
      steps[i] = keep * steps[i] + take * (step * step);
      weights[i] = Weights::store(weight - lr * step, rounding, i);
    }
  }
};
