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
#include "optim/sgd_kernel.h"
#include "optim/adagrad_kernel.h"
#include "optim/adam_kernel.h"
// clang-format on

template <class Rule, class Weights>
void run(const RowUpdate* updates, std::size_t count, const KernelParams& params) noexcept {
  for (std::size_t i = 0; i < count; ++i) Rule::template update<Weights>(updates[i], params);
}

#define SPARSEROW_KERNELS_OF(rule) {run<rule, Float32Weights>, run<rule, BFloat16Weights>, run<rule, Float16Weights>}

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {SPARSEROW_KERNELS_OF(SgdKernel), SPARSEROW_KERNELS_OF(SgdMomentumKernel),
                            SPARSEROW_KERNELS_OF(AdagradKernel), SPARSEROW_KERNELS_OF(RowWiseAdagradKernel),
                            SPARSEROW_KERNELS_OF(AdamKernel)};

}  // namespace sparserow::SPARSEROW_ISA
