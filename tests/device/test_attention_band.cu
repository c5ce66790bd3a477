// Band: visible keys and rows, block ranges and fully visible blocks. Small problems are compared
// with a search over all pairs, problems at the limits of int32 with 64-bit intervals; a host test
// holds those intervals against the search.
#include "attention/mask.cuh"
#include "band_cases.h"
#include "harness.h"

namespace flashattn_ext::testing {
namespace {

// A block of queries and one of keys; single rows are asked for at m0 and n0.
struct Question {
  BandProblem problem;
  int32_t m0, block_m, n0, block_n;
};

struct Answer {
  bool covers;            // every query of the block sees every key of the block
  Interval key_blocks;    // that the queries see something of
  Interval query_blocks;  // that see something of the keys
  Interval keys;          // that query m0 sees
  Interval rows;          // that see key n0, below seqlen_q
};

__global__ void band_kernel(const Question* questions, Answer* answers, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Question& q = questions[i];
  FwdParams params;
  params.window_left = q.problem.window_left;
  params.window_right = q.problem.window_right;
  params.top_left = q.problem.top_left;
  const Band band(params, q.problem.seqlen_q, q.problem.seqlen_k);
  const BlockRange key_blocks = band.key_blocks(q.m0, q.block_m, q.block_n);
  const BlockRange query_blocks = band.query_blocks(q.n0, q.block_n, q.block_m);
  // Rows are not clipped to the queries by Band.
  const int64_t first_row = max(0, band.first_row(q.n0));
  const int64_t end_row = min(q.problem.seqlen_q, band.end_row(q.n0));
  answers[i].covers = band.covers(q.m0, q.block_m, q.n0, q.block_n);
  answers[i].key_blocks = {key_blocks.begin, key_blocks.end};
  answers[i].query_blocks = {query_blocks.begin, query_blocks.end};
  answers[i].keys = {band.first_key(q.m0), band.end_key(q.m0)};
  answers[i].rows = {first_row, end_row};
}

// ---- Two references ----

Interval blocks_of(Interval x, int64_t block) {
  return x.empty() ? Interval{0, 0} : Interval{x.begin / block, (x.end + block - 1) / block};
}

// `covers` asks about whole blocks: a block's rows past seqlen_q count as queries.
Answer search(const Question& q) {
  const BandProblem& p = q.problem;
  Answer answer = {true, {INT32_MAX, 0}, {INT32_MAX, 0}, {INT32_MAX, 0}, {INT32_MAX, 0}};
  for (int64_t i = q.m0; i < q.m0 + q.block_m; ++i)
    for (int64_t j = q.n0; j < q.n0 + q.block_n; ++j) {
      answer.covers = answer.covers && j < p.seqlen_k && p.in_window(i, j);
    }
  const auto extend = [](Interval& x, int64_t at) {
    x = {std::min(x.begin, at), std::max(x.end, at + 1)};
  };
  for (int64_t i = 0; i < p.seqlen_q; ++i)
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      if (!p.visible(i, j)) continue;
      if (i >= q.m0 && i < q.m0 + q.block_m) extend(answer.key_blocks, j / q.block_n);
      if (j >= q.n0 && j < q.n0 + q.block_n) extend(answer.query_blocks, i / q.block_m);
      if (i == q.m0) extend(answer.keys, j);
      if (j == q.n0) extend(answer.rows, i);
    }
  return answer;
}

Answer intervals(const Question& q) {
  const BandProblem& p = q.problem;
  const int64_t lower = p.off() - p.window_left, upper = p.off() + p.window_right;
  const int64_t last_row = std::min<int64_t>(q.m0 + q.block_m, p.seqlen_q) - 1;
  const int64_t last_key = std::min<int64_t>(q.n0 + q.block_n, p.seqlen_k) - 1;
  const auto keys = [&](int64_t first, int64_t last) {
    return Interval{std::max<int64_t>(0, first + lower),
                    std::min<int64_t>(p.seqlen_k, last + upper + 1)};
  };
  const auto rows = [&](int64_t first, int64_t last) {
    return Interval{std::max<int64_t>(0, first - upper),
                    std::min<int64_t>(p.seqlen_q, last - lower + 1)};
  };
  // Positions of the block's keys relative to its queries span [nearest, farthest].
  const int64_t nearest = int64_t{q.n0} - q.m0 - q.block_m + 1;
  const int64_t farthest = int64_t{q.n0} + q.block_n - 1 - q.m0;
  Answer answer;
  answer.covers = int64_t{q.n0} + q.block_n <= p.seqlen_k && farthest <= upper && nearest >= lower;
  answer.key_blocks = blocks_of(keys(q.m0, last_row), q.block_n);
  answer.query_blocks = blocks_of(rows(q.n0, last_key), q.block_m);
  answer.keys = keys(q.m0, q.m0);
  answer.rows = rows(q.n0, q.n0);
  return answer;
}

// ---- Comparison ----

void check_interval(const Question& q, const char* what, Interval actual, Interval expected) {
  check(actual == expected, "%s, queries %d+%d, keys %d+%d: %s [%lld, %lld), wanted [%lld, %lld)",
        q.problem.text().c_str(), q.m0, q.block_m, q.n0, q.block_n, what,
        static_cast<long long>(actual.begin), static_cast<long long>(actual.end),
        static_cast<long long>(expected.begin), static_cast<long long>(expected.end));
}

void check_answer(const Question& q, const Answer& actual, const Answer& expected) {
  check(actual.covers == expected.covers, "%s, queries %d+%d, keys %d+%d: covers %d, wanted %d",
        q.problem.text().c_str(), q.m0, q.block_m, q.n0, q.block_n, actual.covers, expected.covers);
  check_interval(q, "key blocks", actual.key_blocks, expected.key_blocks);
  check_interval(q, "query blocks", actual.query_blocks, expected.query_blocks);
  check_interval(q, "keys of the first query", actual.keys, expected.keys);
  check_interval(q, "queries of the first key", actual.rows, expected.rows);
}

// Blocks at the starts, in the middle and at the ends of both sequences, and key blocks at the
// edges of what the first query sees.
std::vector<Question> ask(const std::vector<BandProblem>& problems, int32_t block_m,
                          int32_t block_n) {
  const auto places = [](int32_t seqlen, int32_t block) {
    return std::vector<int64_t>{0, block, seqlen / 2, int64_t{seqlen} - 1 - block, seqlen - 1};
  };
  std::vector<Question> questions;
  for (const BandProblem& p : problems)
    for (const int64_t row : places(p.seqlen_q, block_m)) {
      const int32_t m0 = block_start(row, p.seqlen_q, block_m);
      std::vector<int64_t> keys = places(p.seqlen_k, block_n);
      for (const int64_t edge : {m0 + p.off() - p.window_left, m0 + p.off() + p.window_right}) {
        keys.insert(keys.end(), {edge - block_n, edge, edge + block_n});
      }
      for (const int64_t key : keys) {
        questions.push_back({p, m0, block_m, block_start(key, p.seqlen_k, block_n), block_n});
      }
    }
  return questions;
}

void check_device(const std::vector<Question>& questions, Answer (*reference)(const Question&)) {
  const DeviceBuffer<Question> gQuestions(questions);
  DeviceBuffer<Answer> gAnswers(questions.size());
  const int count = static_cast<int>(questions.size());
  launch({(count + 127) / 128, 128}, band_kernel, gQuestions.data(), gAnswers.data(), count);
  const std::vector<Answer> answers = gAnswers.to_host();
  for (int i = 0; i < count; ++i) check_answer(questions[i], answers[i], reference(questions[i]));
}

const HostTest references_agree("band.intervals_match_the_search", [] {
  for (const auto& [block_m, block_n] : {std::pair{16, 8}, std::pair{4, 16}})
    for (const Question& q : ask(small_problems(), block_m, block_n)) {
      check_answer(q, intervals(q), search(q));
    }
});

const DeviceTest small("band.small_problems", [] {
  check_device(ask(small_problems(), 16, 8), search);
  check_device(ask(small_problems(), 4, 16), search);
});

const DeviceTest extreme("band.extreme_problems", [] {
  check_device(ask(extreme_problems(), 128, 64), intervals);
  check_device(ask(extreme_problems(), 64, 128), intervals);
});

}  // namespace
}  // namespace flashattn_ext::testing
