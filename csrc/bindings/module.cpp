// The module deepinfer_backend._core.
#include "bindings/bindings.hpp"
#include "engine/handle_pool.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core: sequences, blocks, scheduler, request outputs. Contracts are in _core.pyi.";
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const deepinfer::NotFound& not_found) {
      py::set_error(PyExc_LookupError, not_found.what());
    }
  });
  deepinfer::bind_options(m);
  deepinfer::bind_step_arrays(m);
  deepinfer::bind_batch(m);
  deepinfer::bind_outputs(m);
  deepinfer::bind_scheduler(m);
  deepinfer::bind_process_end(m);
}
