#include "scratch.h"

#include <cstdlib>
#include <new>

namespace outrider {

Scratch& Scratch::of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

void* Scratch::room(int slot, std::size_t bytes) {
  if (bytes > size_[slot]) {
    const std::size_t rounded = (bytes + 4095) / 4096 * 4096;
    void* memory = std::aligned_alloc(64, rounded);
    if (!memory) throw std::bad_alloc();
    std::free(memory_[slot]);
    memory_[slot] = memory;
    size_[slot] = rounded;
  }
  return memory_[slot];
}

Scratch::~Scratch() {
  for (void* memory : memory_) std::free(memory);
}

}  // namespace outrider
