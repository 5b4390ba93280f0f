#define SPARSEROW_ISA baseline
#include "store/table/uniform_fill_body.h"
