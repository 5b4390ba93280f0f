// The kernel table of one instruction set. The including file defines SPARSEROW_ISA, its namespace's name,
// and nothing here may call a function that is neither in this namespace nor always inlined.
#include <cstddef>
#include <cstdint>

#include "optim/kernels.h"
#include "util/random.h"

namespace sparserow::SPARSEROW_ISA {
namespace {

// clang-format off
#include "optim/weights_kernel.h"
#include "optim/terms_kernel.h"
#include "optim/sgd_kernel.h"
#include "optim/adagrad_kernel.h"
#include "optim/adam_kernel.h"
#include "optim/rmsprop_kernel.h"
#include "optim/adadelta_kernel.h"
#include "optim/lion_kernel.h"
#include "optim/lamb_kernel.h"
#include "optim/ftrl_kernel.h"
// clang-format on

template <class Rule, class Weights>
void run(const RowUpdate* updates, std::size_t count, const KernelParams& params) noexcept {
  for (std::size_t i = 0; i < count; ++i) Rule::template update<Weights>(updates[i], params);
}

#define SPARSEROW_KERNELS_OF(rule) {run<rule, Float32Weights>, run<rule, BFloat16Weights>, run<rule, Float16Weights>}

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {
    .sgd = SPARSEROW_KERNELS_OF(SgdKernel),
    .sgd_momentum = SPARSEROW_KERNELS_OF(SgdMomentumKernel),
    .adagrad = SPARSEROW_KERNELS_OF(AdagradKernel),
    .rowwise_adagrad = SPARSEROW_KERNELS_OF(RowWiseAdagradKernel),
    .adam = SPARSEROW_KERNELS_OF(AdamKernel<false>),
    .adam_amsgrad = SPARSEROW_KERNELS_OF(AdamKernel<true>),
    .rmsprop = SPARSEROW_KERNELS_OF(PlainRmsprop),
    .rmsprop_momentum = SPARSEROW_KERNELS_OF(MomentumRmsprop),
    .rmsprop_centered = SPARSEROW_KERNELS_OF(CenteredRmsprop),
    .rmsprop_centered_momentum = SPARSEROW_KERNELS_OF(CenteredMomentumRmsprop),
    .adadelta = SPARSEROW_KERNELS_OF(AdadeltaKernel),
    .lion = SPARSEROW_KERNELS_OF(LionKernel),
    .lamb = SPARSEROW_KERNELS_OF(LambKernel),
    .ftrl = SPARSEROW_KERNELS_OF(FtrlKernel),
    .ftrl_group = SPARSEROW_KERNELS_OF(GroupFtrlKernel),
};

}  // namespace sparserow::SPARSEROW_ISA
