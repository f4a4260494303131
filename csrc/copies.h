// Where the end of a text stood in it before.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

// How many of the text's last tokens stood together at an earlier place, and the token that followed them there; of several
// places the one where most did, of equals the latest. `matched` 0: nowhere, and `token` means nothing.
struct Copy {
  std::size_t matched;
  std::int64_t token;
};

// At most `most` tokens are compared.
Copy find_copy(const std::int64_t* text, std::size_t size, std::size_t most);

}  // namespace outrider
