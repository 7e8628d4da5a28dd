// How likely the next draft of a sequence is right, and how many are worth a step's time.
#pragma once

#include <cstdint>

namespace deepinfer {

// The exponential average of what became of a sequence's drafts.
class AcceptanceRate {
 public:
  // Takes a draft that came after right ones alone. One that a step was to verify and that was not there counts as a
  // wrong one: steps are launched before it is known whether there are any.
  void take(bool is_right) { rate_ += kWeight * ((is_right ? 1.0 : 0.0) - rate_); }
  // Of a step that had no drafts: what was known is forgotten, slowly, so that they are tried again.
  void take_nothing() { rate_ += kForgottenShare * (kInitialRate - rate_); }

  [[nodiscard]] double rate() const { return rate_; }

  // How many drafts to verify, at most max_num_drafts: as many as are right with a probability above `threshold`, each
  // with all before it. 0: all of them.
  [[nodiscard]] int32_t num_drafts(double threshold, int32_t max_num_drafts) const {
    if (threshold <= 0) return max_num_drafts;
    int32_t num_drafts = 0;
    for (double probability = rate_; num_drafts < max_num_drafts && probability > threshold; probability *= rate_) {
      ++num_drafts;
    }
    return num_drafts;
  }

 private:
  static constexpr double kInitialRate = 0.5;
  static constexpr double kWeight = 0.125;
  static constexpr double kForgottenShare = 1.0 / 1024;

  double rate_ = kInitialRate;
};

}  // namespace deepinfer
