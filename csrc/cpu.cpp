#include "cpu.h"

#include <stdexcept>

namespace outrider {

std::vector<std::string> available_levels() {
  std::vector<std::string> levels{"portable"};
#if defined(OUTRIDER_X86)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    levels.push_back("avx2");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
      levels.push_back("avx512");
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
    return portable_kernels();
  }
  throw std::invalid_argument("instruction-set level '" + level + "' is not available here; available: " + known);
}

}  // namespace outrider
