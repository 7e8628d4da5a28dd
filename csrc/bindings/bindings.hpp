// What the files of the module deepinfer_backend._core share: names, GIL, docstrings, no logic. Contracts are in
// _core.pyi and in the engine's headers.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/scheduled_batch.hpp"
#include "engine/scheduler.hpp"

namespace deepinfer {

namespace py = pybind11;
using namespace pybind11::literals;  // NOLINT: the documented way to get "name"_a

using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using Handles = py::array_t<uint64_t, py::array::c_style>;
using TokenIds = py::array_t<int32_t, py::array::c_style>;

template <typename T>
py::array_t<T> to_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// Whether an array has exactly these extents.
[[nodiscard]] bool has_shape(const py::array& array, const std::vector<py::ssize_t>& shape);

struct BoundStepArrays {
  StepArrays arrays;
  std::vector<py::array> owners;  // keep the memory that `arrays` points into
};

struct BoundStepLogprobs {
  StepLogprobs logprobs;
  std::vector<py::array> owners;  // keep the memory that `logprobs` points into
};

// A handle and its pool, resolved at every read.
struct BoundMetadata {
  std::shared_ptr<SequenceMetadataPool> pool;
  uint64_t handle;
  [[nodiscard]] const SequenceMetadata& get() const { return pool->get(handle); }
};

struct BoundMetadataList {
  std::shared_ptr<ScheduledBatch> batch;
  [[nodiscard]] BoundMetadata at(py::ssize_t index) const;
};

void bind_options(py::module_& m);
void bind_step_arrays(py::module_& m);
void bind_batch(py::module_& m);
void bind_outputs(py::module_& m);
void bind_scheduler(py::module_& m);
void bind_process_end(py::module_& m);

}  // namespace deepinfer
