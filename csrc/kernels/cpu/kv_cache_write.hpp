// `PagedAttentionKernels::write`.
#pragma once

#include "kernels/cpu/paged_attention.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

void write_kv_cache(const LayerCache& cache, const AttentionBatch& batch, const Rotary& rotary, const HeadNorms& norms,
                    int64_t num_heads, float* query, const float* key, const float* value, int64_t row_stride);

}  // namespace deepinfer::cpu::DEEPINFER_ISA
