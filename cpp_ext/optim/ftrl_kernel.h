// FTRL-proximal (McMahan et al. 2013, algorithm 1) on one row, with L1, L2 and group lasso.
//
// After each gradient the weights minimise
//   z.w + sum_i (beta + sqrt(n_i)) / lr * w_i^2 / 2 + l2 |w|^2 / 2 + l1 |w|_1 + group_lasso sqrt(dim) |w|_2,
// where n sums squares of gradients and z sums gradients less what moves the proximal term's centre with the learning
// rate. At a minimum, z = -(beta + sqrt(n)) / lr * w - r, with r a subgradient of the three regularisers at w. r does
// not depend on the learning rate, and follows from w where w is not 0. So the state is [n (dim)][-r where w is 0
// (dim)], and every step solves for the change of w: a gradient of zero changes no bit, also after the learning rate
// changed. Included inside an ISA namespace (kernels.h).

// One column's problem. `multiplier` is what group lasso adds to l2: group_lasso sqrt(dim) / |w| of the new row;
// `before` is that of the old row. Both are 0 without group lasso.
struct FtrlColumn {
  float grad;
  float weight;
  float residual;   // z, where the weight is 0
  float proximity;  // beta + sqrt(n)

  [[gnu::always_inline]] float curvature(const KernelParams& params, float multiplier) const noexcept {
    return proximity + params.lr * (params.l2 + multiplier);
  }
  [[gnu::always_inline]] float sign() const noexcept { return weight < 0.0f ? -1.0f : 1.0f; }

  // The new weight: one that keeps its sign, else one of the other sign, else 0.
  [[gnu::always_inline]] float moved(const KernelParams& params, float multiplier, float before) const noexcept {
    const bool is_zero = weight == 0.0f;
    const float step = params.lr / curvature(params, multiplier);
    const float slope = is_zero ? grad + residual : grad + (multiplier - before) * weight;
    const float own = weight - step * (is_zero ? slope + params.l1 : slope);
    const float other = weight - step * (slope - (is_zero ? params.l1 : sign() * 2.0f * params.l1));
    return sign() * own > 0.0f ? own : (sign() * other < 0.0f ? other : 0.0f);
  }

  // z after the gradient; meant for a column whose new weight is 0.
  [[gnu::always_inline]] float next_residual(const KernelParams& params, float before) const noexcept {
    const float pull = weight * (proximity * (1.0f / params.lr) + (params.l2 + before)) + sign() * params.l1;
    return weight == 0.0f ? grad + residual : grad - pull;
  }
};

static float ftrl_residual_of(float weight, float l1) noexcept {
  return (weight < 0.0f ? l1 : 0.0f) - (weight > 0.0f ? l1 : 0.0f);
}

static float clamped(float value, float most) noexcept { return value > most ? most : (value < -most ? -most : value); }

struct FtrlKernel {
  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict sums = row.state;
    float* __restrict residuals = row.state + params.dim;
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const Decay decay(params);
    const float scale = params.grad_scale;
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float stored = Weights::load(weights[i]);
      const float grad = decay.gradient(grads[i] * scale, stored);
      const float sum = sums[i] + grad * grad;
      sums[i] = sum;
      const FtrlColumn column{grad, decay.weight(stored), residuals[i], params.beta + __builtin_sqrtf(sum)};
      const float moved = column.moved(params, 0.0f, 0.0f);
      const float rest = clamped(column.next_residual(params, 0.0f), params.l1);
      residuals[i] = moved == 0.0f ? rest : ftrl_residual_of(moved, params.l1);
      weights[i] = Weights::store(moved, rounding, i);
    }
  }
};

// With group lasso (Yuan & Lin 2006; with L1: Simon et al. 2013) a row is 0 while |soft(z, l1)|_2 <= group_lasso
// sqrt(dim). Beyond it, the row's norm solves |w(norm)| = norm, by Newton's method on
// norm / |w(norm)| = 1, whose left side is concave and nearly linear (More & Sorensen 1983).
struct GroupFtrlKernel {
  static constexpr int kMostIterations = 20;
  static constexpr float kSmallChange = 3e-4f;  // of the norm; Newton's next change would be about its square

  template <class Weights>
  static void update(const RowUpdate& row, const KernelParams& params) noexcept {
    auto* __restrict weights = reinterpret_cast<typename Weights::Element*>(row.weights);
    float* __restrict sums = row.state;
    float* __restrict residuals = row.state + params.dim;
    const float* __restrict grads = row.grad;
    const Rounding rounding(params, row);
    const Decay decay(params);
    const float scale = params.grad_scale;
    const auto column = [=](std::uint32_t i) __attribute__((always_inline)) {
      const float stored = Weights::load(weights[i]);
      return FtrlColumn{decay.gradient(grads[i] * scale, stored), decay.weight(stored), residuals[i],
                        params.beta + __builtin_sqrtf(sums[i])};
    };
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const float grad = decay.gradient(grads[i] * scale, Weights::load(weights[i]));
      sums[i] = sums[i] + grad * grad;
    }
    const float limit = params.group_lasso * __builtin_sqrtf(static_cast<float>(params.dim));
    const float norm_before = __builtin_sqrtf(sum_columns(params.dim, [=](std::uint32_t i) {
      const float weight = decay.weight(Weights::load(weights[i]));
      return weight * weight;
    }));
    const float before = norm_before > 0.0f ? limit / norm_before : 0.0f;
    const float pull = __builtin_sqrtf(sum_columns(params.dim, [=](std::uint32_t i) {
      const FtrlColumn each = column(i);
      const float force = each.moved(params, before, before) * each.curvature(params, before);
      return force * force;
    }));  // lr |soft(z, l1)|
    const bool is_zero = !(pull > params.lr * limit);
    const float multiplier =
        is_zero ? 0.0f : limit / norm_after(params, column, norm_before, before, limit, pull - params.lr * limit);
    const float kept = is_zero ? 0.0f : 1.0f;
    const float band = is_zero ? __builtin_inff() : params.l1;  // of residuals: a row that is 0 keeps all of z
    for (std::uint32_t i = 0; i < params.dim; ++i) {
      const FtrlColumn each = column(i);
      const float moved = kept * each.moved(params, multiplier, before);
      const float rest = clamped(each.next_residual(params, before), band);
      residuals[i] = moved == 0.0f ? rest : ftrl_residual_of(moved, params.l1);
      weights[i] = Weights::store(moved, rounding, i);
    }
  }

 private:
  // The norm of the new row. `excess` is lr times what the pull has beyond the limit, and is positive.
  template <class Column>
  static float norm_after(const KernelParams& params, Column column, float norm_before, float before, float limit,
                          float excess) noexcept {
    const float steepness = __builtin_sqrtf(sum_columns(params.dim, [=](std::uint32_t i) {
      const float curvature = column(i).curvature(params, 0.0f);
      return curvature * curvature;
    }));
    const float least = 0.5f * excess / steepness;  // no column is as steep, and the half is for rounding
    float norm = norm_before > 0.0f ? norm_before : least * __builtin_sqrtf(static_cast<float>(params.dim));
    for (int iteration = 0; iteration < kMostIterations; ++iteration) {
      const float multiplier = limit / norm;
      const float squares = sum_columns(params.dim, [=](std::uint32_t i) {
        const float moved = column(i).moved(params, multiplier, before);
        return moved * moved;
      });
      const float bent = sum_columns(params.dim, [=](std::uint32_t i) {
        const FtrlColumn each = column(i);
        const float moved = each.moved(params, multiplier, before);
        return moved * moved * (each.curvature(params, 0.0f) / each.curvature(params, multiplier));
      });
      const float change = (__builtin_sqrtf(squares) - norm) * (squares / bent);
      const float next = norm + change;
      norm = next > least ? next : least;
      const float size = change < 0.0f ? -change : change;
      if (!(size > kSmallChange * norm)) break;
    }
    return norm;
  }
};
