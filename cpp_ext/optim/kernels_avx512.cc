#if defined(__x86_64__)
#define SPARSEROW_ISA avx512
#include "optim/kernels_body.h"
#endif
