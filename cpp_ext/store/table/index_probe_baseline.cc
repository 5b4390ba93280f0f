#define SPARSEROW_ISA baseline
#include "store/table/index_probe_body.h"
