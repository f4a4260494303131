// Python bindings: addresses and sizes as whole numbers, since an array argument costs more than a small kernel.
// Only values inside tensors are checked here; outrider.kernels.ops checks shapes and types.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "blocks.h"
#include "cpu.h"
#include "pool.h"
#include "scratch.h"

namespace nb = nanobind;

namespace outrider {
namespace {

using Address = std::uintptr_t;

// Above this many multiply-adds a call lets other Python threads run.
constexpr std::size_t kLongCall = std::size_t{1} << 27;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

std::size_t as_size(std::int64_t number) { return static_cast<std::size_t>(number); }

void require(bool holds, const char* what, std::size_t row) {
  if (!holds) throw std::out_of_range(std::string(what) + " of row " + std::to_string(row) + " is outside the tensor");
}

void dequantise_at(Address raw, Address out, std::size_t values, int type, int dtype) {
  nb::gil_scoped_release release;
  dequantise(at<std::uint8_t>(raw), at<void>(out), values, static_cast<GgmlType>(type), static_cast<Dtype>(dtype));
}

class Level {
 public:
  explicit Level(const std::string& name) : name_(name), kernels_(kernels_of(name)) {}

  const std::string& name() const { return name_; }
  std::size_t panel() const { return kernels_.panel; }

  void pack(Address weight, Address packed, std::size_t n, std::size_t k, int dtype) const {
    nb::gil_scoped_release release;
    const std::size_t panels = (n + kernels_.panel - 1) / kernels_.panel;
    ask_for_large_pages(at<void>(packed), panels * kernels_.panel * k * (static_cast<Dtype>(dtype) == Dtype::kF32 ? 4 : 2));
    kernels_.pack(at<void>(weight), at<void>(packed), n, k, static_cast<Dtype>(dtype));
  }

  void linear(Address packed, Address bias, Address x, Address y, std::size_t rows, std::size_t n, std::size_t k, int dtype) const {
    const LinearJob job{at<void>(packed), at<float>(bias), at<float>(x), at<float>(y), rows, n, k, static_cast<Dtype>(dtype)};
    if (rows * n * k < kLongCall) return kernels_.linear(job);
    nb::gil_scoped_release release;
    kernels_.linear(job);
  }

  // Bytes of whole panels of `n` columns.
  std::size_t quant_bytes(std::size_t n, std::size_t k, int type) const {
    return (n + kernels_.quant_panel - 1) / kernels_.quant_panel * panel_bytes(k, type);
  }

  void quant_pack(Address raw, Address packed, std::size_t n, std::size_t k, int type) const {
    nb::gil_scoped_release release;
    ask_for_large_pages(at<void>(packed), quant_bytes(n, k, type));
    pack_quantised(at<std::uint8_t>(raw), at<std::uint8_t>(packed), n, k, kernels_.quant_panel, static_cast<GgmlType>(type));
  }

  void quant_linear(Address packed, Address bias, Address x, Address y, std::size_t rows, std::size_t n, std::size_t k,
                    int type) const {
    const QuantLinearJob job{at<std::uint8_t>(packed), at<float>(bias), at<float>(x), at<float>(y), rows, n, k,
                             panel_bytes(k, type), static_cast<GgmlType>(type)};
    if (rows * n * k < kLongCall) return kernels_.quant_linear(job);
    nb::gil_scoped_release release;
    kernels_.quant_linear(job);
  }

  void rms_norm(Address x, Address delta, Address weight, Address out, std::size_t rows, std::size_t k, float eps) const {
    kernels_.rms_norm(at<float>(x), at<float>(delta), at<float>(weight), at<float>(out), rows, k, eps);
  }

  void swiglu(Address gate_up, Address out, std::size_t rows, std::size_t width) const {
    kernels_.swiglu(at<float>(gate_up), at<float>(out), rows, width);
  }

  void rope(Address x, Address cos, Address sin, Address positions, std::size_t table, std::size_t rows, std::size_t step,
            std::size_t heads, std::size_t width) const {
    const std::int64_t* position = at<std::int64_t>(positions);
    for (std::size_t row = 0; row < rows; ++row) require(position[row] >= 0 && as_size(position[row]) < table, "position", row);
    kernels_.rope(at<float>(x), at<float>(cos), at<float>(sin), position, rows, step, heads, width);
  }

  void attention(Address q, Address keys, Address values, Address out, Address lengths, Address starts, Address ancestors,
                 std::size_t positions, std::size_t rows, std::size_t q_step, std::size_t slots, std::size_t heads,
                 std::size_t kv_heads, std::size_t width, int dtype) const {
    const std::int32_t* length = at<std::int32_t>(lengths);
    const std::int32_t* start = at<std::int32_t>(starts);
    for (std::size_t row = 0; row < rows; ++row) {
      require(length[row] >= 0 && as_size(length[row]) + slots <= positions, "length", row);
      require(!start || (start[row] >= 0 && start[row] <= length[row]), "start", row);
    }
    const AttentionJob job{at<float>(q), at<void>(keys), at<void>(values), at<float>(out), length, start,
                           at<std::uint8_t>(ancestors), rows, q_step, slots, heads, kv_heads, width, static_cast<Dtype>(dtype)};
    kernels_.attention(job);
  }

 private:
  std::size_t panel_bytes(std::size_t k, int type) const {
    const BlockShape shape = block_shape(static_cast<GgmlType>(type));
    return k / shape.inputs * shape.packed_bytes() * kernels_.quant_panel;
  }

  std::string name_;
  const Kernels& kernels_;
};

}  // namespace

NB_MODULE(_kernels, m) {
  m.def("available_levels", &available_levels);
  m.def("set_threads", &set_threads);
  m.def("threads", &threads);
  m.def("physical_cores", &physical_cores);
  m.def("dequantise", &dequantise_at);
  nb::class_<Level>(m, "Level")
      .def(nb::init<const std::string&>())
      .def_prop_ro("name", &Level::name)
      .def_prop_ro("panel", &Level::panel)
      .def("pack", &Level::pack)
      .def("linear", &Level::linear)
      .def("quant_bytes", &Level::quant_bytes)
      .def("quant_pack", &Level::quant_pack)
      .def("quant_linear", &Level::quant_linear)
      .def("rms_norm", &Level::rms_norm)
      .def("swiglu", &Level::swiglu)
      .def("rope", &Level::rope)
      .def("attention", &Level::attention);
}

}  // namespace outrider
