#define SPARSEROW_ISA baseline
#include "optim/kernels_body.h"
