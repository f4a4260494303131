#include "cpu.h"

#include <stdexcept>

#if defined(OUTRIDER_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {
namespace {

// Whether this build and the processor have AMX for whole numbers.
bool has_tiles() {
#if defined(OUTRIDER_AMX)
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8");
#else
  return false;
#endif
}

// Linux keeps tiles from a process until it asks, once and for all its threads; signal stacks must have room for them.
bool tiles_granted() {
#if defined(OUTRIDER_AMX)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

}  // namespace

bool amx_refused() { return has_tiles() && !tiles_granted(); }

std::vector<std::string> available_levels() {
  std::vector<std::string> levels{"portable"};
#if defined(OUTRIDER_X86)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    levels.push_back("avx2");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
      levels.push_back("avx512");
      if (has_tiles() && tiles_granted()) levels.push_back("amx");
    }
  }
#endif
  return levels;
}

const Kernels& kernels_of(const std::string& level) {
  std::string known;
  for (const std::string& name : available_levels()) {
    known += known.empty() ? name : ", " + name;
    if (name != level) continue;
#if defined(OUTRIDER_X86)
    if (name == "avx2") return avx2_kernels();
    if (name == "avx512") return avx512_kernels();
#endif
#if defined(OUTRIDER_AMX)
    if (name == "amx") return amx_kernels();
#endif
    return portable_kernels();
  }
  throw std::invalid_argument("instruction-set level '" + level + "' is not available here; available: " + known);
}

}  // namespace outrider
