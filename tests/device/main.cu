// Lists and runs the unit tests of csrc/ptx, csrc/tile, csrc/attention and of the Hopper kernels'
// tiles and tensor maps.
//
//   flashattn_ext_device_tests [--list] [--host-only] [NAME ...]
//
// Without names all tests run; NAME may end in * to stand for every name that starts so. A test
// that this GPU cannot run is skipped, and its line says why. Exit status: 0 none failed, 1 a test
// failed, 2 nothing could be run.
#include <chrono>

#include "harness.h"

namespace {

using flashattn_ext::testing::registry;
using flashattn_ext::testing::Test;

bool matches(const std::string& name, const std::string& pattern) {
  if (!pattern.empty() && pattern.back() == '*') {
    return name.compare(0, pattern.size() - 1, pattern, 0, pattern.size() - 1) == 0;
  }
  return name == pattern;
}

// The tests of these patterns (all without any) in the order of their names.
std::vector<Test> select(const std::vector<std::string>& patterns, bool host_only) {
  std::vector<Test> selected;
  for (const Test& test : registry()) {
    const bool named = std::any_of(patterns.begin(), patterns.end(), [&](const auto& pattern) {
      return matches(test.name, pattern);
    });
    if ((named || patterns.empty()) && !(host_only && test.needs_gpu)) selected.push_back(test);
  }
  std::sort(selected.begin(), selected.end(),
            [](const Test& a, const Test& b) { return a.name < b.name; });
  return selected;
}

bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// Why this GPU cannot run the test; empty where it can.
std::string reason_to_skip(const Test& test) {
  if (!test.needs_hopper) return "";
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major == 9 && minor == 0) return "";
  return "needs a GPU of compute capability 9.0, this one has " + std::to_string(major) + "." +
         std::to_string(minor);
}

// Runs one test and prints its line.
bool passes(const Test& test) {
  std::string failure;
  const auto started = std::chrono::steady_clock::now();
  try {
    test.run();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - started;
  if (failure.empty()) {
    std::printf("pass %s (%.1f ms)\n", test.name.c_str(), elapsed.count());
  } else {
    std::printf("FAIL %s: %s\n", test.name.c_str(), failure.c_str());
    // An error that stays with the CUDA context must not fail the tests that follow.
    if (test.needs_gpu) cudaDeviceReset();
  }
  std::fflush(stdout);
  return failure.empty();
}

}  // namespace

int main(int argc, char** argv) {
  bool list = false, host_only = false;
  std::vector<std::string> patterns;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--list") {
      list = true;
    } else if (argument == "--host-only") {
      host_only = true;
    } else if (argument.compare(0, 1, "-") == 0) {
      std::fprintf(stderr, "unknown option %s; usage: %s [--list] [--host-only] [NAME ...]\n",
                   argument.c_str(), argv[0]);
      return 2;
    } else {
      patterns.push_back(argument);
    }
  }

  const std::vector<Test> tests = select(patterns, host_only);
  if (tests.empty()) {
    std::fprintf(stderr, "no test has such a name; --list prints all names\n");
    return 2;
  }
  if (list) {
    for (const Test& test : tests) std::printf("%s\n", test.name.c_str());
    return 0;
  }
  const bool needs_gpu =
      std::any_of(tests.begin(), tests.end(), [](const Test& test) { return test.needs_gpu; });
  if (needs_gpu && !has_gpu()) {
    std::fprintf(stderr, "no CUDA device here: --host-only runs the tests that need none\n");
    return 2;
  }

  size_t passed = 0, failed = 0, skipped = 0;
  for (const Test& test : tests) {
    const std::string reason = reason_to_skip(test);
    if (reason.empty()) {
      ++(passes(test) ? passed : failed);
    } else {
      std::printf("skip %s: %s\n", test.name.c_str(), reason.c_str());
      ++skipped;
    }
  }
  std::printf("%zu passed, %zu failed, %zu skipped\n", passed, failed, skipped);
  return failed == 0 ? 0 : 1;
}
