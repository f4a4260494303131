#include "scratch.h"

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

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

void ask_for_large_pages(void* memory, std::size_t bytes) {
#if defined(__linux__)
  constexpr std::uintptr_t kPage = 4096;
  const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a refusal costs speed alone
#else
  (void)memory;
  (void)bytes;
#endif
}

}  // namespace outrider
