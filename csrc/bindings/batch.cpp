// One step: its sequences and what the Worker asks of it.
#include <string>
#include <utility>

#include "bindings/bindings.hpp"

namespace deepinfer {
namespace {

template <typename Field>
auto metadata_field(Field SequenceMetadata::* field) {
  return [field](const BoundMetadata& self) { return self.get().*field; };
}

// Rows that have `kColumns` numbers each, of which `first` is the first.
template <py::ssize_t kColumns, typename Row, typename T>
py::array_t<T> to_table(const std::vector<Row>& rows, T Row::* first) {
  static_assert(sizeof(Row) == kColumns * sizeof(T));
  return py::array_t<T>({static_cast<py::ssize_t>(rows.size()), kColumns},
                        rows.empty() ? nullptr : &(rows.front().*first));
}

std::vector<std::pair<int32_t, py::array_t<int32_t>>> new_slots(const ScheduledBatch& batch) {
  std::vector<std::pair<int32_t, py::array_t<int32_t>>> result;
  for (const NewSlot& slot : batch.new_slots) {
    const auto num_tokens = static_cast<py::ssize_t>(slot.end - slot.begin);
    result.emplace_back(slot.slot, py::array_t<int32_t>(num_tokens, batch.new_slot_tokens.data() + slot.begin));
  }
  return result;
}

}  // namespace

BoundMetadata BoundMetadataList::at(py::ssize_t index) const {
  const auto size = static_cast<py::ssize_t>(batch->metadata().size());
  if (index < 0) index += size;
  if (index < 0 || index >= size) throw py::index_error("the batch has " + std::to_string(size) + " sequences");
  return {batch->pool(), batch->metadata()[static_cast<size_t>(index)]};
}

void bind_batch(py::module_& m) {
  py::class_<BoundMetadata>(m, "SequenceMetadata", py::is_final(),
                            "One sequence's part in one step; reading one whose step is over raises LookupError.")
      .def_property_readonly("request_id", metadata_field(&SequenceMetadata::request_id))
      .def_property_readonly("seq_id", metadata_field(&SequenceMetadata::seq_id))
      .def_property_readonly("is_prefill", metadata_field(&SequenceMetadata::is_prefill))
      .def_property_readonly("block_table", [](const BoundMetadata& self) { return to_array(self.get().block_table); })
      .def_property_readonly("seqlen_q", metadata_field(&SequenceMetadata::seqlen_q))
      .def_property_readonly("seqlen_k", metadata_field(&SequenceMetadata::seqlen_k))
      .def_property_readonly("samples", metadata_field(&SequenceMetadata::samples))
      .def_property_readonly("output_index", metadata_field(&SequenceMetadata::output_index));

  py::class_<SequenceMetadataPool, std::shared_ptr<SequenceMetadataPool>>(
      m, "SequenceMetadataPool", py::is_final(), "Grows to the largest step, then never allocates again.")
      .def(py::init<>())
      .def_property_readonly("num_in_use", &SequenceMetadataPool::num_in_use);

  py::class_<BoundMetadataList>(m, "SequenceMetadataList", py::is_final(), "The batch's sequences, in batch order.")
      .def("__len__", [](const BoundMetadataList& self) { return self.batch->metadata().size(); })
      .def("__getitem__", &BoundMetadataList::at, "index"_a)
      // Python's own iterator over anything with __getitem__; it ends at the IndexError.
      .def("__iter__",
           [](const py::object& self) { return py::reinterpret_steal<py::iterator>(PySeqIter_New(self.ptr())); });

  py::class_<ScheduledBatch, std::shared_ptr<ScheduledBatch>>(m, "SchedulerOutputs", py::is_final(),
                                                              "One scheduled batch: prefill or decode, maybe empty.")
      .def("is_empty", &ScheduledBatch::is_empty)
      .def_readonly("is_prefill", &ScheduledBatch::is_prefill)
      .def_property_readonly("num_seqs", &ScheduledBatch::num_seqs)
      .def_property_readonly("num_tokens", &ScheduledBatch::num_tokens)
      .def_property_readonly("num_sampled", &ScheduledBatch::num_sampled)
      .def_property_readonly("num_sampled_rows", &ScheduledBatch::num_sampled_rows)
      .def_property_readonly("num_prompt_logits", &ScheduledBatch::num_prompt_logits)
      .def_property_readonly("num_banned", &ScheduledBatch::num_banned)
      .def_readonly("max_query_len", &ScheduledBatch::max_query_len)
      .def_readonly("max_seq_len", &ScheduledBatch::max_seq_len)
      .def_readonly("max_num_blocks", &ScheduledBatch::max_num_blocks)
      .def_readonly("all_greedy", &ScheduledBatch::all_greedy)
      .def_readonly("max_top_k", &ScheduledBatch::max_top_k)
      .def_readonly("any_top_p", &ScheduledBatch::any_top_p)
      .def_readonly("any_min_p", &ScheduledBatch::any_min_p)
      .def_readonly("any_lora", &ScheduledBatch::any_lora)
      .def_property_readonly("lora_ids", [](const ScheduledBatch& self) { return to_array(self.lora_ids); })
      .def_property_readonly("tracked_rows", [](const ScheduledBatch& self) { return to_array(self.tracked_rows); })
      .def_property_readonly("tracked_seq_ids",
                             [](const ScheduledBatch& self) { return to_array(self.tracked_seq_ids); })
      .def_property_readonly(
          "prompt_logits",
          [](const ScheduledBatch& self) { return to_table<3>(self.prompt_logits, &PromptLogitsSpan::seq_id); })
      .def_property_readonly(
          "media_rows", [](const ScheduledBatch& self) { return to_table<4>(self.media_rows, &MediaRow::media_id); })
      .def_property_readonly("draft_query_lens",
                             [](const ScheduledBatch& self) { return to_array(self.draft_query_lens); })
      .def_readonly("max_num_proposed", &ScheduledBatch::max_num_proposed)
      .def_property_readonly("new_slots", &new_slots)
      .def_readonly("num_preempted", &ScheduledBatch::num_preempted)
      .def_readonly("num_cached_tokens", &ScheduledBatch::num_cached_tokens)
      .def_property_readonly(
          "block_copies", [](const ScheduledBatch& self) { return to_table<2>(self.block_copies, &BlockCopy::source); })
      .def(
          "write", [](const ScheduledBatch& self, const BoundStepArrays& arrays) { self.write(arrays.arrays); },
          "arrays"_a, ReleaseGil());
}

}  // namespace deepinfer
