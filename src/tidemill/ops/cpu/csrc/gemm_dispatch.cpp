#include "gemm_dispatch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace tidemill {
namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avxvnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }

bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

bool has_amx() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return has_avx512bf16() && __builtin_cpu_supports("amx-tile") &&
         __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct Candidate {
  bool (*runs)();
  ManyRowKernels kernels;
};

// Best first. bf16 comes before int8 products, which are about a third faster on paper, since it
// is four times as exact.
constexpr Candidate kCandidates[] = {
    {has_amx, {"amx", gemm_amx, gemm_amx, attention_prefill_amx}},
    {has_avx512bf16,
     {"avx512bf16", gemm_avx512bf16, gemm_avx512bf16, attention_prefill_avx512bf16}},
    {has_avx512vnni, {"avx512vnni", gemm_avx512vnni, gemm_avx512, attention_prefill_avx512}},
    {has_avx512, {"avx512", gemm_avx512, gemm_avx512, attention_prefill_avx512}},
    {has_avxvnni, {"avxvnni", gemm_avxvnni, gemm_avx2, attention_prefill_avx2}},
    {has_avx2, {"avx2", gemm_avx2, gemm_avx2, attention_prefill_avx2}},
};

}  // namespace

const ManyRowKernels* many_row_kernels(const char* name) {
  for (const Candidate& candidate : kCandidates) {
    if (name != nullptr && std::strcmp(name, candidate.kernels.name) != 0) continue;
    if (candidate.runs()) return &candidate.kernels;
  }
  return nullptr;
}

}  // namespace tidemill
