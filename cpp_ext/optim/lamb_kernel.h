// LAMB (You et al. 2020, algorithm 2), with one trust ratio a row: |weights| / |update|, and 1 where either is 0.
// Decoupled decay is a part of the update, as in the paper. t is the row's own update count.
// State is [first moment (dim)][second moment (dim)]. Included inside an ISA namespace (kernels.h).

struct LambKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict first = row.state;
    float* __restrict second = row.state + params.dim;
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const auto correction1 = static_cast<float>(1.0 - power(params.beta1, row.update_count));
    const auto root = static_cast<float>(__builtin_sqrt(1.0 - power(params.beta2, row.update_count)));
    const auto take1 = static_cast<float>(1.0 - params.beta1);
    const auto keep2 = static_cast<float>(params.beta2);
    const auto take2 = static_cast<float>(1.0 - params.beta2);
    const float coupled = params.decoupled ? 0.0f : params.weight_decay;
    const float decoupled = params.decoupled ? params.weight_decay : 0.0f;
    const float scale = params.grad_scale, eps = params.eps;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float grad = grads[i] * scale + coupled * Weights::load(weights[i]);
      first[i] = first[i] + (grad - first[i]) * take1;
      second[i] = keep2 * second[i] + take2 * (grad * grad);
    }
    const auto step = [=](std::uint32_t i) {
      const float unit = first[i] / correction1 / (__builtin_sqrtf(second[i]) / root + eps);
      return unit + decoupled * Weights::load(weights[i]);
    };
    const auto weight = [=](std::uint32_t i) { return Weights::load(weights[i]); };
    const float size = __builtin_sqrtf(sum_columns(params.dim, [=](std::uint32_t i) { return weight(i) * weight(i); }));
    const float moved = __builtin_sqrtf(sum_columns(params.dim, [=](std::uint32_t i) { return step(i) * step(i); }));
    const float ratio = size > 0.0f && moved > 0.0f ? size / moved : 1.0f;
    const float rate = params.lr * ratio;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      weights[i] = Weights::store(weight(i) - rate * step(i), rounding, i);
    }
  }
};
