// How a product is cut: panels of columns, blocks of rows.

namespace outrider {
namespace {

constexpr std::size_t kPanel = 2 * Vec::kLanes;         // columns that are packed together
constexpr std::size_t kVectors = kPanel / Vec::kLanes;  // of a panel

struct Rows {
  std::size_t first, count;
};

inline std::size_t blocks_of(std::size_t rows, std::size_t most) { return (rows + most - 1) / most; }

// Block `index` of rows cut into as few blocks of at most `most` as there can be; they differ by one row at most.
inline Rows block_rows(std::size_t rows, std::size_t most, std::size_t index) {
  const std::size_t blocks = blocks_of(rows, most), first = rows * index / blocks;
  return Rows{first, rows * (index + 1) / blocks - first};
}

}  // namespace
}  // namespace outrider
