"""The same call gives the same bits: over runs, streams, threads and batch positions."""

import threading

import harness
import pytest
import torch
from cases import Case, Options, VarlenCase, make_tensors, make_varlen_tensors
from plans import first_unordered_length

from flashattn_ext import explain, flash_attn_func

REPEATS = {"cpu": 3, "cuda": 20}

CASES = [
    Case(
        head_dim=64, seqlen_q=600, seqlen_k=600, heads_q=8, heads_k=2, options=Options(causal=True)
    ),
    Case(head_dim=128, seqlen_q=513, seqlen_k=700, options=Options(window_size=(200, 0))),
    Case(head_dim=256, seqlen_q=300, seqlen_k=900, dtype=torch.float16),
    Case(head_dim=40, head_dim_v=72, seqlen_q=257, seqlen_k=129, options=Options(softcap=20.0)),
    # More tiles than SMs, of unequal work: which CTA takes which differs from run to run.
    Case(
        head_dim=128, seqlen_q=700, seqlen_k=700, batch=5, heads_q=16, options=Options(causal=True)
    ),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_repeats(device, case, deterministic):
    case = case.on(device)
    x = make_tensors(case, device)
    options = {**case.options.kwargs(), "deterministic": deterministic}
    first = harness.run(x, options, with_dlse=True)
    for _ in range(REPEATS[device]):
        harness.assert_bitwise(harness.run(x, options, with_dlse=True), first)


def test_varlen_repeats(device):
    case = VarlenCase(
        lengths_q=(300, 0, 7, 129),
        lengths_k=(450, 3, 7, 129),
        heads_q=6,
        tail_q=5,
        tail_k=5,
        options=Options(causal=True),
    ).on(device)
    x = make_varlen_tensors(case, device)
    first = harness.run(x, {"causal": True}, with_dlse=True)
    for _ in range(REPEATS[device]):
        harness.assert_bitwise(harness.run(x, {"causal": True}, with_dlse=True), first)


def test_under_deterministic_algorithms(device, switch):
    """`torch.use_deterministic_algorithms(True)` without warn_only: nothing raises."""
    x = make_tensors(CASES[0].on(device), device)
    first = harness.run(x, {"causal": True})
    switch(True)
    harness.assert_bitwise(harness.run(x, {"causal": True}), first)


@pytest.mark.no_poison
def test_without_deterministic_algorithms(device, switch):
    """Where the fixed order is the faster one, the bits do not depend on torch's switch."""
    x = make_tensors(CASES[0].on(device), device)
    assert not torch.are_deterministic_algorithms_enabled()
    first = harness.run(x, {"causal": True})
    switch(True, warn_only=True)
    harness.assert_bitwise(harness.run(x, {"causal": True}), first)


def assert_repeats(x, options, names, first=None, plan=None):
    """A hundred runs give the same `names`, compared where they are; returns the first run."""
    for _ in range(100):
        actual = harness.run(x, options, plan, with_dlse=True)
        first = first or actual
        for name in names:
            assert torch.equal(actual[name], first[name]), name
    return first


@pytest.mark.gpu
@pytest.mark.no_poison
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_hundred_runs(head_dim, causal, switch):
    """Of a length at which CTAs add to dq in any order, where they share it and may do so."""
    shared = head_dim <= 128
    seqlen = first_unordered_length(dim=head_dim, causal=causal) if shared else 2100
    case = Case(head_dim=head_dim, seqlen_q=seqlen, seqlen_k=seqlen, batch=1, heads_k=4)
    x = make_tensors(case, "cuda")
    plan = explain(x.q, x.k, x.v, causal=causal, backward=True)
    assert plan.deterministic == (plan.family != "sm90_fused")
    ordered = harness.RESULTS
    unordered = tuple(name for name in ordered if name != "dq")
    assert_repeats(x, {"causal": causal}, ordered if plan.deterministic else unordered)
    first = assert_repeats(x, {"causal": causal, "deterministic": True}, ordered)
    switch(True)
    assert_repeats(x, {"causal": causal}, ordered, first)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.no_poison
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_hundred_runs_of_the_fused_kernel_in_order(head_dim):
    """Named, it keeps the order only if asked to. Not named, it does so at this length."""
    # More tiles than SMs, of unequal work: which CTA takes which differs from run to run.
    case = Case(head_dim=head_dim, seqlen_q=700, seqlen_k=700, heads_q=32, heads_k=16)
    x = make_tensors(case, "cuda")
    options = {"causal": True, "deterministic": True}
    first = assert_repeats(x, options, harness.RESULTS, plan="sm90_fused")
    harness.assert_bitwise(harness.run(x, {"causal": True}, with_dlse=True), first)


def test_threads(device):
    """Calls from several threads at once, each on its own inputs."""
    cases = [case.on(device) for case in CASES]
    inputs = [make_tensors(case, device) for case in cases]
    wanted = [harness.run(x, case.options.kwargs()) for x, case in zip(inputs, cases)]
    actual = [[] for _ in cases]

    def work(index):
        for _ in range(3):
            actual[index].append(harness.run(inputs[index], cases[index].options.kwargs()))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, one in zip(actual, wanted):
        assert len(results) == 3
        for result in results:
            harness.assert_bitwise(result, one)


@pytest.mark.gpu
def test_streams():
    """Interleaved on four streams: each call uses the current stream, and no shared state."""
    inputs = [make_tensors(case, "cuda") for case in CASES]
    wanted = [harness.run(x, case.options.kwargs()) for x, case in zip(inputs, CASES)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in CASES]
    actual = []
    for _ in range(5):
        for stream, x, case in zip(streams, inputs, CASES):
            with torch.cuda.stream(stream):
                actual.append(harness.run(x, case.options.kwargs()))
    torch.cuda.synchronize()
    for index, result in enumerate(actual):
        harness.assert_bitwise(result, wanted[index % len(CASES)])


@pytest.mark.gpu
def test_runs_on_the_current_stream():
    """Inputs written late on a side stream: a launch on another stream would read them early."""
    x = make_tensors(Case(seqlen_q=512, seqlen_k=512), "cuda")
    wanted = flash_attn_func(x.q, x.k, x.v)
    late = torch.zeros_like(x.q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(x.q)
        out = flash_attn_func(late, x.k, x.v)
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


def test_a_row_does_not_depend_on_its_batch(device_plan):
    """Batch entries and heads are computed alone: a slice of the batch has the batch's bits."""
    device, plan = device_plan
    case = Case(batch=3, heads_q=6, heads_k=3, seqlen_q=200, seqlen_k=200)
    x = make_tensors(case, device)
    out = flash_attn_func(x.q, x.k, x.v, causal=True, plan=plan)
    parts = x.q[1:2, :, 2:4], x.k[1:2, :, 1:2], x.v[1:2, :, 1:2]
    one = flash_attn_func(*parts, causal=True, plan=plan)
    harness.assert_same_kernel(device, {"out": one}, {"out": out[1:2, :, 2:4]})
