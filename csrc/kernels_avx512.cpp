// Compiled for this instruction set alone. No standard containers or inline library functions here: the linker may keep
// this file's copy of one for code that must run everywhere.
#include "vec_avx512.h"

#include "kernels.h"
#include "narrow.h"
#include "pool.h"
#include "scratch.h"

#include "panels.inl"

#include "linear.inl"
#include "rows.inl"

#include "attention.inl"
#include "encode.inl"

#include "codes.inl"

#include "activations.inl"
#include "quantised.inl"

namespace outrider {

const Kernels& avx512_kernels() {
  static const Kernels kernels{kPanel, 0, pack, linear, quant_linear, rms_norm, swiglu, rope, attention, encode_q4_0};
  return kernels;
}

}  // namespace outrider
