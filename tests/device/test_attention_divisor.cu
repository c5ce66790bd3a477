// Divisor against the division it stands for, on the host.
#include "attention/divisor.h"
#include "harness.h"

namespace flashattn_ext::testing {
namespace {

constexpr int32_t kLargest = INT32_MAX;

void check_division(const Divisor& by, int32_t divisor, int64_t x) {
  if (x < 0 || x > kLargest) return;
  const int32_t got = by.divide(static_cast<int32_t>(x));
  check(got == x / divisor, "%lld / %d: got %d", static_cast<long long>(x), divisor, got);
}

// The quotient changes at multiples: these and their neighbours, from the smallest to the largest.
void check_divisor(int32_t divisor) {
  const Divisor by(divisor);
  check(by.divisor == divisor, "a divisor of %d says it is %d", divisor, by.divisor);
  const int64_t most = kLargest / divisor, step = std::max<int64_t>(most / 1000, 1);
  for (int64_t quotient = 0; quotient <= most; quotient += step)
    for (const int64_t distance : {-1, 0, 1}) {
      check_division(by, divisor, quotient * divisor + distance);
      check_division(by, divisor, (most - quotient) * divisor + distance);
    }
  for (const int64_t x : {0, 1, 2, kLargest - 1, kLargest}) check_division(by, divisor, x);
}

const HostTest small("divisor.small_divisors", [] {
  for (int32_t divisor = 1; divisor <= 1000; ++divisor) check_divisor(divisor);
});

// Powers of two, their neighbours and thrice them up to the largest number there is.
const HostTest powers("divisor.around_powers_of_two", [] {
  for (int64_t power = 1; power <= int64_t{1} << 31; power *= 2)
    for (const int64_t divisor : {power - 1, power, power + 1, 3 * power - 1, 3 * power}) {
      if (divisor >= 1 && divisor <= kLargest) check_divisor(static_cast<int32_t>(divisor));
    }
});

const HostTest random_numbers("divisor.random_numbers", [] {
  std::mt19937 generator(1);
  for (int i = 0; i < 2000; ++i) {
    // Of every magnitude.
    const int32_t divisor = std::max<int32_t>(generator() >> (1 + i % 31), 1);
    check_divisor(divisor);
    const Divisor by(divisor);
    for (int j = 0; j < 100; ++j) check_division(by, divisor, generator() >> 1);
  }
});

}  // namespace
}  // namespace flashattn_ext::testing
