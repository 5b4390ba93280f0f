#if defined(__x86_64__)
#define SPARSEROW_ISA avx512
#include "store/table/index_probe_body.h"
#endif
