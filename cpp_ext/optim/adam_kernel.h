// Adam (Kingma & Ba 2015, algorithm 1), as torch.optim.Adam and AdamW on one row: t is the row's own update count.
// State is [first moment (dim)][second moment (dim)], and with AMSGrad (Reddi, Kale & Kumar 2018) [largest second
// moment (dim)]. Included inside an ISA namespace (kernels.h).

template <bool kIsAmsgrad>
struct AdamKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict first = row.state;
    float* __restrict second = row.state + params.dim;
    float* __restrict largest = row.state + 2 * params.dim;  // there with AMSGrad alone
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const Decay decay(params);
    const double correction1 = 1.0 - power(params.beta1, row.update_count);
    const double correction2 = 1.0 - power(params.beta2, row.update_count);
    const auto step = static_cast<float>(static_cast<double>(params.lr) / correction1);
    const auto root = static_cast<float>(__builtin_sqrt(correction2));
    const auto take1 = static_cast<float>(1.0 - params.beta1);
    const auto keep2 = static_cast<float>(params.beta2);
    const auto take2 = static_cast<float>(1.0 - params.beta2);
    const float scale = params.grad_scale, eps = params.eps;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float stored = Weights::load(weights[i]);
      const float grad = decay.gradient(grads[i] * scale, stored);
      const float weight = decay.weight(stored);
      const float moment1 = first[i] + (grad - first[i]) * take1;
      const float moment2 = keep2 * second[i] + take2 * (grad * grad);
      first[i] = moment1;
      second[i] = moment2;
      float bound = moment2;
      if constexpr (kIsAmsgrad) {
        bound = largest[i] > moment2 ? largest[i] : moment2;
        largest[i] = bound;
      }
      weights[i] = Weights::store(weight - step * (moment1 / (__builtin_sqrtf(bound) / root + eps)), rounding, i);
    }
  }
};
