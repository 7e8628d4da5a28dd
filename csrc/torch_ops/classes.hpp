// The classes in torch.classes.deepinfer: each is defined in its own file and registered in classes.cpp.
#pragma once

#include <torch/library.h>

namespace deepinfer {

void define_packed_linear(torch::Library& library);
void define_decoder(torch::Library& library);

}  // namespace deepinfer
