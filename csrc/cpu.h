// Instruction-set levels and the choice among them.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace outrider {

// Levels that this build holds and this processor and system run, worst first.
std::vector<std::string> available_levels();

// Whether the system keeps AMX from this process, though build and processor have it. The first call of either asks for it.
bool amx_refused();

// Throws std::invalid_argument for a level that is not available.
const Kernels& kernels_of(const std::string& level);

}  // namespace outrider
