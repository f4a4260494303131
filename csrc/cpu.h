// Instruction-set levels and the choice among them.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace outrider {

// Levels that this build holds and this processor runs, worst first.
std::vector<std::string> available_levels();

// Throws std::invalid_argument for a level that is not available.
const Kernels& kernels_of(const std::string& level);

}  // namespace outrider
