#include "copies.h"

namespace outrider {

Copy find_copy(const std::int64_t* text, std::size_t size, std::size_t most) {
  Copy found{0, 0};
  if (size == 0) return found;
  const std::int64_t last = text[size - 1];
  for (std::size_t next = size - 1; next > 0 && found.matched < most; --next) {
    if (text[next - 1] != last) continue;
    std::size_t matched = 1;
    while (matched < most && matched < next && text[next - 1 - matched] == text[size - 1 - matched]) ++matched;
    if (matched > found.matched) found = {matched, text[next]};
  }
  return found;
}

}  // namespace outrider
