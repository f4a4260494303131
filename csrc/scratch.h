// Working memory that a calling thread keeps from call to call.
#pragma once

#include <cstddef>

namespace outrider {

class Scratch {
 public:
  static Scratch& of_thread();

  // At least `bytes` bytes, 64-byte aligned, valid until the next call for this slot: 0 and 1 are the kernels', 2 is the
  // stack's, 3 the chain's. Throws std::bad_alloc.
  void* room(int slot, std::size_t bytes);

  ~Scratch();

 private:
  void* memory_[4] = {};
  std::size_t size_[4] = {};
};

// Asks the system to back whole pages of fresh memory with large ones; streaming through it is then about a tenth faster.
void ask_for_large_pages(void* memory, std::size_t bytes);

}  // namespace outrider
