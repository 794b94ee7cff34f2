// Step kernels for CPUs with AVX-VNNI and no AVX-512 (laptops since 2021).
#include "step_kernels.h"

#pragma GCC target("avx2,avxvnni,fma,f16c")
#define TIDEMILL_VNNI

#include "attention_decode_loop.h"
#include "few_rows_loop.h"
#include "row_loop.h"

namespace tidemill {

const StepKernels step_kernels_avxvnni = {
    "avxvnni", norm,       widen,      narrow,         quantize,
    few_rows, unpack_row, rope_write, attention_span, merge_spans,
};

}  // namespace tidemill
