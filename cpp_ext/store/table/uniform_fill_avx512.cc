#if defined(__x86_64__)
#define SPARSEROW_ISA avx512
#include "store/table/uniform_fill_body.h"
#endif
