// Step kernels for CPUs with AVX2 and FMA.
#include "step_kernels.h"

#pragma GCC target("avx2,fma,f16c")

#include "attention_decode_loop.h"
#include "few_rows_loop.h"
#include "row_loop.h"

namespace tidemill {

const StepKernels step_kernels_avx2 = {
    "avx2", norm,       widen,      narrow,         quantize,
    few_rows, unpack_row, rope_write, attention_span, merge_spans,
};

}  // namespace tidemill
