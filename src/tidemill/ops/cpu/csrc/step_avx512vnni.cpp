// Step kernels for CPUs with AVX-512 and VNNI.
#include "step_kernels.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")
#define TIDEMILL_AVX512
#define TIDEMILL_VNNI

#include "attention_decode_loop.h"
#include "few_rows_loop.h"
#include "row_loop.h"

namespace tidemill {

const StepKernels step_kernels_avx512vnni = {
    "avx512vnni", norm,       widen,      narrow,         quantize,
    few_rows, unpack_row, rope_write, attention_span, merge_spans,
};

}  // namespace tidemill
