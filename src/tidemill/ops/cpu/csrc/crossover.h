// Up to how many rows the few-row kernels are faster than the many-row ones on this machine.
#pragma once

#include "pool.h"
#include "program.h"

namespace tidemill {

// Measured on weights of one format, which should be more than caches hold, as a step's are: 0, 8,
// 16, 32 or 64. So coarse that it hardly ever differs from one start to the next. Takes some ten
// milliseconds for ten megabytes. Throws std::bad_alloc.
int measure_few_rows(Pool& pool, const Machine& machine, const Weight* const* weights, int count);

}  // namespace tidemill
