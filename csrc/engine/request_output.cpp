#include "engine/request_output.hpp"

#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

namespace deepinfer {
namespace {

struct PackedHeader {
  uint32_t magic;
  uint32_t version;
  uint64_t num_outputs;
  uint64_t num_bytes;  // of the whole buffer, this header included
};

struct PackedOutput {
  int64_t seq_id;
  int64_t output_index;
  int64_t num_prompt_tokens;
  int64_t num_cached_tokens;
  int64_t first_scheduled_time_ns;
  int64_t num_draft_tokens;
  int64_t num_accepted_draft_tokens;
  int32_t sequence_index;
  int32_t token_id;
  int32_t stop_token_id;
  int32_t rank;
  uint32_t logprob;           // a float's bits: two floats may be equal without having the same
  uint32_t request_id_bytes;  // they follow this struct, then the likeliest tokens
  uint32_t num_top_logprobs;
  uint8_t finished;
  uint8_t finish_reason;
  uint8_t padding[2];
};

static_assert(sizeof(TokenLogprob) == sizeof(int32_t) + sizeof(float));

// Copied byte by byte: padding that the compiler adds would carry whatever was in memory.
static_assert(std::has_unique_object_representations_v<PackedHeader>);
static_assert(std::has_unique_object_representations_v<PackedOutput>);

constexpr uint32_t kMagic = 0x4f524944;  // "DIRO"
constexpr uint32_t kVersion = 3;

template <typename T>
void append(std::string& data, const T& value) {
  data.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("packed outputs: " + what); }

// Reads from the front of a buffer and never past its end.
class Reader {
 public:
  explicit Reader(std::string_view data) : rest_(data) {}

  template <typename T>
  T take() {
    T value;
    std::memcpy(&value, take_bytes(sizeof(T)).data(), sizeof(T));
    return value;
  }

  std::string_view take_bytes(size_t size) {
    if (rest_.size() < size) refuse("the data is truncated");
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  [[nodiscard]] size_t num_left() const { return rest_.size(); }

 private:
  std::string_view rest_;
};

}  // namespace

std::map<int32_t, std::string> pack(const RequestOutputPool& pool, const uint64_t* handles, size_t num_handles) {
  std::map<int32_t, PackedHeader> headers;
  for (size_t i = 0; i < num_handles; ++i) {
    const RequestOutput& output = pool.get(handles[i]);
    if (output.request_id.size() > std::numeric_limits<uint32_t>::max()) refuse("a request id is too long");
    const auto empty = PackedHeader{kMagic, kVersion, 0, sizeof(PackedHeader)};
    PackedHeader& header = headers.try_emplace(output.client_index, empty).first->second;
    ++header.num_outputs;
    header.num_bytes += sizeof(PackedOutput) + output.request_id.size();
    header.num_bytes += output.top_logprobs.size() * sizeof(TokenLogprob);
  }
  std::map<int32_t, std::string> data_of_clients;
  for (const auto& [client_index, header] : headers) {
    std::string& data = data_of_clients[client_index];
    data.reserve(header.num_bytes);
    append(data, header);
  }
  for (size_t i = 0; i < num_handles; ++i) {
    const RequestOutput& output = pool.get(handles[i]);
    std::string& data = data_of_clients.at(output.client_index);
    uint32_t logprob_bits;
    std::memcpy(&logprob_bits, &output.logprob, sizeof(logprob_bits));
    append(data, PackedOutput{output.seq_id,
                              output.output_index,
                              output.num_prompt_tokens,
                              output.num_cached_tokens,
                              output.first_scheduled_time_ns,
                              output.num_draft_tokens,
                              output.num_accepted_draft_tokens,
                              output.sequence_index,
                              output.token_id,
                              output.stop_token_id,
                              output.rank,
                              logprob_bits,
                              static_cast<uint32_t>(output.request_id.size()),
                              static_cast<uint32_t>(output.top_logprobs.size()),
                              output.finished,
                              static_cast<uint8_t>(output.finish_reason),
                              {}});
    data += output.request_id;
    for (const TokenLogprob& top : output.top_logprobs) append(data, top);
  }
  return data_of_clients;
}

std::vector<RequestOutput> unpack(std::string_view data) {
  Reader reader(data);
  const auto header = reader.take<PackedHeader>();
  if (header.magic != kMagic || header.version != kVersion) refuse("not the data of this version's pack()");
  if (header.num_bytes != data.size()) {
    refuse("the data has " + std::to_string(data.size()) + " bytes, its header says " +
           std::to_string(header.num_bytes));
  }
  // Checked before anything is reserved, so that a broken count cannot ask for all memory.
  if (header.num_outputs > reader.num_left() / sizeof(PackedOutput)) refuse("the data is truncated");
  std::vector<RequestOutput> outputs;
  outputs.reserve(header.num_outputs);
  for (uint64_t i = 0; i < header.num_outputs; ++i) {
    const auto packed = reader.take<PackedOutput>();
    if (packed.finish_reason > static_cast<uint8_t>(FinishReason::kError)) refuse("unknown finish reason");
    RequestOutput output;
    output.request_id = reader.take_bytes(packed.request_id_bytes);
    if (packed.num_top_logprobs > reader.num_left() / sizeof(TokenLogprob)) refuse("the data is truncated");
    output.top_logprobs.resize(packed.num_top_logprobs);
    for (TokenLogprob& top : output.top_logprobs) top = reader.take<TokenLogprob>();
    output.seq_id = packed.seq_id;
    output.sequence_index = packed.sequence_index;
    output.output_index = packed.output_index;
    output.token_id = packed.token_id;
    output.finished = packed.finished != 0;
    output.finish_reason = static_cast<FinishReason>(packed.finish_reason);
    output.stop_token_id = packed.stop_token_id;
    output.num_prompt_tokens = packed.num_prompt_tokens;
    output.num_cached_tokens = packed.num_cached_tokens;
    output.first_scheduled_time_ns = packed.first_scheduled_time_ns;
    output.num_draft_tokens = packed.num_draft_tokens;
    output.num_accepted_draft_tokens = packed.num_accepted_draft_tokens;
    output.rank = packed.rank;
    std::memcpy(&output.logprob, &packed.logprob, sizeof(output.logprob));
    outputs.push_back(std::move(output));
  }
  if (reader.num_left() != 0) refuse("the data is too long");
  return outputs;
}

}  // namespace deepinfer
