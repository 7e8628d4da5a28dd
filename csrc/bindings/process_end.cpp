// A process that ends with another one.
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "bindings/bindings.hpp"

namespace deepinfer {

void bind_process_end(py::module_& m) {
  m.def(
      "end_process_with",
      [](int process) {
        std::thread([process] {
          pollfd ended{process, POLLIN, 0};
          while (poll(&ended, 1, -1) < 0 && errno == EINTR) continue;
          _exit(1);
        }).detach();
      },
      "process"_a);
}

}  // namespace deepinfer
