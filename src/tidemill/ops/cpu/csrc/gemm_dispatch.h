// Which many-row kernels this CPU runs.
#pragma once

#include "attention_prefill.h"
#include "gemm.h"

namespace tidemill {

struct ManyRowKernels {
  const char* name;
  GemmFunction* gemm_integers;  // u4 and u8 weights
  GemmFunction* gemm_bf16;      // bf16 weights
  PrefillFunction* attention_prefill;

  GemmFunction* gemm(Format format) const {
    return format == Format::bf16 ? gemm_bf16 : gemm_integers;
  }
};

// The best set that the CPU and the kernel allow, or the one of that name ("amx", "avx512bf16",
// "avx512vnni", "avx512", "avxvnni", "avx2"); null if it cannot run here. Asks Linux for the use of
// AMX, which it grants per process.
const ManyRowKernels* many_row_kernels(const char* name = nullptr);

}  // namespace tidemill
