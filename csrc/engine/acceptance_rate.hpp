// How likely the next draft is right, and how many are worth a step's time.
#pragma once

#include <cstdint>

namespace deepinfer {

// The exponential average of what became of the drafts of one sequence, or of all.
class AcceptanceRate {
 public:
  static constexpr double kOfSequence = 0.125;  // the weight of one draft
  static constexpr double kOfAll = 1.0 / 64;

  explicit AcceptanceRate(double weight, double initial_rate = kUnknownRate) : weight_(weight), rate_(initial_rate) {}

  // Takes a draft that came after right ones alone. One that a step was to verify and that was not there counts as a
  // wrong one: steps are launched before it is known whether there are any.
  void take(bool is_right) { rate_ += weight_ * ((is_right ? 1.0 : 0.0) - rate_); }
  // After a step that tells nothing: what was known is forgotten, slowly, so that drafts are tried again.
  void take_nothing() { rate_ += kForgottenShare * (kUnknownRate - rate_); }

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
  static constexpr double kUnknownRate = 0.5;
  static constexpr double kForgottenShare = 1.0 / 1024;

  double weight_;
  double rate_;
};

}  // namespace deepinfer
