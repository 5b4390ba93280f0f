// RMSprop (Tieleman & Hinton 2012; centered: Graves 2013), as torch.optim.RMSprop on one row. State is
// [mean square (dim)], then [mean (dim)] when centered, then [momentum (dim)] with momentum.
// Included inside an ISA namespace (kernels.h).

template <bool kIsCentered, bool kHasMomentum>
struct RmspropKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict squares = row.state;
    float* __restrict means = row.state + params.dim;
    float* __restrict buffer = row.state + (kIsCentered ? 2 : 1) * params.dim;
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const Decay decay(params);
    const auto keep = static_cast<float>(params.alpha);
    const auto take = static_cast<float>(1.0 - params.alpha);
    const float scale = params.grad_scale, lr = params.lr, eps = params.eps, momentum = params.momentum;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float stored = Weights::load(weights[i]);
      const float grad = decay.gradient(grads[i] * scale, stored);
      const float weight = decay.weight(stored);
      const float square = keep * squares[i] + take * (grad * grad);
      squares[i] = square;
      float variance = square;
      if constexpr (kIsCentered) {
        const float mean = means[i] + (grad - means[i]) * take;
        means[i] = mean;
        const float rest = square - mean * mean;
        variance = rest > 0.0f ? rest : 0.0f;  // rounding can make it negative
      }
      float moved = grad / (__builtin_sqrtf(variance) + eps);
      if constexpr (kHasMomentum) {
        moved = momentum * buffer[i] + moved;
        buffer[i] = moved;
      }
      weights[i] = Weights::store(weight - lr * moved, rounding, i);
    }
  }
};

using PlainRmsprop = RmspropKernel<false, false>;
using MomentumRmsprop = RmspropKernel<false, true>;
using CenteredRmsprop = RmspropKernel<true, false>;
using CenteredMomentumRmsprop = RmspropKernel<true, true>;
