// What comes out of steps.
#include <map>
#include <string>
#include <utility>

#include "bindings/bindings.hpp"
#include "engine/request_output.hpp"

namespace deepinfer {

void bind_outputs(py::module_& m) {
  py::class_<RequestOutput>(m, "RequestOutput", py::is_final(),
                            "One new token of one sequence, or (token_id = -1) the news that it ended without one.")
      .def_readonly("request_id", &RequestOutput::request_id)
      .def_readonly("client_index", &RequestOutput::client_index)
      .def_readonly("seq_id", &RequestOutput::seq_id)
      .def_readonly("sequence_index", &RequestOutput::sequence_index)
      .def_readonly("output_index", &RequestOutput::output_index)
      .def_readonly("token_id", &RequestOutput::token_id)
      .def_readonly("finished", &RequestOutput::finished)
      .def_readonly("finish_reason", &RequestOutput::finish_reason)
      .def_readonly("stop_token_id", &RequestOutput::stop_token_id)
      .def_readonly("num_prompt_tokens", &RequestOutput::num_prompt_tokens)
      .def_readonly("num_cached_tokens", &RequestOutput::num_cached_tokens)
      .def_readonly("first_scheduled_time_ns", &RequestOutput::first_scheduled_time_ns)
      .def_readonly("num_draft_tokens", &RequestOutput::num_draft_tokens)
      .def_readonly("num_accepted_draft_tokens", &RequestOutput::num_accepted_draft_tokens)
      .def_readonly("logprob", &RequestOutput::logprob)
      .def_readonly("rank", &RequestOutput::rank)
      .def_property_readonly("top_logprobs",
                             [](const RequestOutput& self) {
                               std::vector<std::pair<int32_t, float>> pairs;
                               for (const TokenLogprob& top : self.top_logprobs) {
                                 pairs.emplace_back(top.token_id, top.logprob);
                               }
                               return pairs;
                             })
      .def_static("clone", &RequestOutputPool::copy_from_any, "handle"_a, "A copy that outlives the step.")
      .def_static(
          "unpack", [](const py::bytes& data) { return unpack(data); }, "data"_a,
          "The outputs that RequestOutputPool.pack wrote.")
      .def("__repr__", [](const RequestOutput& self) {
        return "RequestOutput(request_id='" + self.request_id +
               "', sequence_index=" + std::to_string(self.sequence_index) +
               ", output_index=" + std::to_string(self.output_index) + ", token_id=" + std::to_string(self.token_id) +
               ", finished=" + (self.finished ? "True" : "False") + ")";
      });

  py::class_<WrittenSequence>(m, "WrittenSequence", py::is_final(),
                              "A finished text that the scheduler did not see grow.")
      .def(py::init([](int32_t sequence_index, std::vector<int32_t> token_ids, std::vector<float> logprobs,
                       FinishReason finish_reason, int32_t stop_token_id) {
             return WrittenSequence{sequence_index, std::move(token_ids), std::move(logprobs), finish_reason,
                                    stop_token_id};
           }),
           py::kw_only(), "sequence_index"_a, "token_ids"_a, "logprobs"_a, "finish_reason"_a, "stop_token_id"_a = -1);

  py::class_<RequestOutputPool>(m, "RequestOutputPool", py::is_final(),
                                "Owns the RequestOutputs of a step behind generation-checked handles.")
      .def(py::init<>())
      .def(
          "clone",
          [](const RequestOutputPool& self, const Handles& handles) {
            std::vector<RequestOutput> outputs;
            for (py::ssize_t i = 0; i < handles.size(); ++i) outputs.push_back(self.get(handles.data()[i]));
            return outputs;
          },
          "handles"_a)
      .def(
          "pack",
          [](const RequestOutputPool& self, const Handles& handles) {
            std::map<int32_t, py::bytes> packed;
            for (const auto& [client_index, data] : pack(self, handles.data(), static_cast<size_t>(handles.size()))) {
              packed.emplace(client_index, data);
            }
            return packed;
          },
          "handles"_a)
      .def(
          "release",
          [](RequestOutputPool& self, const Handles& handles) {
            for (py::ssize_t i = 0; i < handles.size(); ++i) self.release(handles.data()[i]);
          },
          "handles"_a)
      .def_property_readonly("num_in_use", &RequestOutputPool::num_in_use);
}

}  // namespace deepinfer
