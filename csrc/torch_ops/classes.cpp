// torch.classes.deepinfer: registered in one place, because torch must know a class before another that takes it.
#include "torch_ops/classes.hpp"

namespace deepinfer {

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  define_packed_linear(m);
  define_decoder(m);
}

}  // namespace deepinfer
