"""CUDA graphs: every op is captured and replayed with other data, lengths and strides of time.

A captured launch may not read device memory on the host, allocate outside torch's pool, or leave
state behind that a second replay would meet.
"""

import harness
import pytest
import torch
from cases import Case, VarlenCase, cumulative, make_tensors, make_varlen_tensors

from flashattn_ext import flash_attn_func, flash_attn_varlen_func, merge

pytestmark = [pytest.mark.gpu, pytest.mark.no_poison]


def capture(function):
    """The captured call and its static results; warmed up on a side stream as torch asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def refill(target, source):
    for name in ("q", "k", "v", "dout", "dlse"):
        getattr(target, name).copy_(getattr(source, name))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 3)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_forward_and_backward(head_dim, options):
    case = Case(head_dim=head_dim, seqlen_q=200, seqlen_k=260)
    static = make_tensors(case, "cuda")
    graph, results = capture(lambda: harness.run(static, options, with_dlse=True))
    for seed in (1, 2):
        torch.manual_seed(seed)
        fresh = make_tensors(case, "cuda")
        refill(static, fresh)
        graph.replay()
        wanted = harness.run(fresh, options, with_dlse=True)
        harness.assert_bitwise(results, wanted)


@pytest.mark.sm90
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_replay_sums_dq_from_zero(head_dim, deterministic):
    """Of keys there are two blocks: a sum of two parts has no order."""
    case = Case(head_dim=head_dim, seqlen_q=300, seqlen_k=250, batch=8, heads_q=16, heads_k=16)
    static = make_tensors(case, "cuda")
    options = {"deterministic": deterministic}
    graph, results = capture(lambda: harness.run(static, options, "sm90_fused"))
    wanted = harness.run(static, options, "sm90_fused")
    for _ in range(3):
        results["dq"].zero_()
        graph.replay()
        harness.assert_bitwise(results, wanted)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_replay_counts_its_tiles_from_zero(head_dim):
    """More tiles than SMs are drawn from a counter in memory."""
    case = Case(head_dim=head_dim, seqlen_q=300, seqlen_k=300, batch=8, heads_q=16, heads_k=16)
    static = make_tensors(case, "cuda")
    graph, (out, lse) = capture(lambda: harness.attend(static, {"causal": True}))
    wanted = dict(zip(("out", "lse"), harness.attend(static, {"causal": True})))
    for _ in range(3):
        out.zero_()
        graph.replay()
        harness.assert_bitwise({"out": out, "lse": lse}, wanted)


LENGTHS = (
    ((100, 0, 50, 40), (120, 9, 60, 41)),
    ((1, 60, 0, 129), (200, 0, 0, 30)),
    ((0, 0, 0, 0), (0, 0, 0, 0)),
    ((190, 0, 0, 0), (0, 0, 0, 230)),
    ((10, 10, 10, 10), (10, 10, 10, 10)),
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_varlen_with_changed_lengths(head_dim, causal):
    """cu_seqlens is rewritten in place between replays; the tail grows and shrinks with it."""
    total_q, total_k, longest = 190, 230, 230

    def packed(lengths_q, lengths_k):
        case = VarlenCase(
            lengths_q=lengths_q,
            lengths_k=lengths_k,
            head_dim=head_dim,
            tail_q=total_q - sum(lengths_q),
            tail_k=total_k - sum(lengths_k),
        )
        x = make_varlen_tensors(case, "cuda")
        x.lengths |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return x

    static = packed(*LENGTHS[0])
    options = {"causal": causal}
    graph, results = capture(lambda: harness.run(static, options, with_dlse=True))
    for lengths_q, lengths_k in LENGTHS[::-1]:
        fresh = packed(lengths_q, lengths_k)
        refill(static, fresh)
        static.lengths["cu_seqlens_q"].copy_(cumulative(lengths_q, "cuda"))
        static.lengths["cu_seqlens_k"].copy_(cumulative(lengths_k, "cuda"))
        graph.replay()
        harness.assert_bitwise(results, harness.run(fresh, options, with_dlse=True))


def test_seqused_changes_between_replays():
    case = VarlenCase(
        lengths_q=(100, 90), lengths_k=(130, 100), seqused_q=(100, 90), seqused_k=(130, 100)
    )
    static = make_varlen_tensors(case, "cuda")
    graph, results = capture(lambda: harness.run(static, {"causal": True}))
    for used_q, used_k in (((7, 90), (130, 1)), ((0, 64), (65, 100)), ((100, 90), (0, 0))):
        static.lengths["seqused_q"].copy_(torch.tensor(used_q, device="cuda"))
        static.lengths["seqused_k"].copy_(torch.tensor(used_k, device="cuda"))
        graph.replay()
        harness.assert_bitwise(results, harness.run(static, {"causal": True}))


def test_merge():
    x = make_tensors(Case(seqlen_q=100, seqlen_k=100), "cuda")

    def halves():
        first = flash_attn_func(x.q, x.k[:, :40], x.v[:, :40], return_lse=True)
        second = flash_attn_func(x.q, x.k[:, 40:], x.v[:, 40:], return_lse=True)
        return merge(*first, *second)

    with torch.no_grad():
        graph, results = capture(halves)
        x.q.normal_()
        graph.replay()
        for actual, wanted in zip(results, halves()):
            assert torch.equal(actual, wanted)


def test_interleaved_replays_of_two_graphs():
    """Two captured calls share nothing: replayed in any order they give their own results."""
    inputs = [make_tensors(Case(head_dim=d, seqlen_q=300, seqlen_k=300), "cuda") for d in (64, 128)]
    wanted = [harness.run(x, {"causal": True}) for x in inputs]
    captured = [capture(lambda x=x: harness.run(x, {"causal": True})) for x in inputs]
    for order in ((0, 1), (1, 0, 0, 1), (1, 1, 0)):
        for _, results in captured:
            for tensor in results.values():
                tensor.zero_()
        for index in order:
            captured[index][0].replay()
        torch.cuda.synchronize()
        for (_, results), plain in zip(captured, wanted):
            harness.assert_bitwise(results, plain)


def test_no_call_waits_for_the_device():
    """torch raises on any synchronising call it makes; a queued sleep would show ours in time."""
    x = make_tensors(Case(seqlen_q=100, seqlen_k=100), "cuda")
    packed = make_varlen_tensors(VarlenCase(lengths_q=(64, 36), lengths_k=(64, 36)), "cuda")
    harness.run(x, {"causal": True})
    harness.run(packed, {"causal": True})
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        asleep = torch.cuda.Event()
        asleep.record()
        harness.run(x, {"causal": True}, with_dlse=True)
        harness.run(packed, {"causal": True})
        with torch.no_grad():
            flash_attn_varlen_func(packed.q, packed.k, packed.v, **packed.lengths)
        assert not asleep.query(), "a call returned only after the queued second of sleep"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
