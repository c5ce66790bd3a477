"""The specification at its edges: rows without keys, enormous biases, zero sizes, memory, time."""

import time

import compare
import pytest
import reference
import torch
import torch.nn.functional as F
from cases import lse_type
from spec_runner import RNG_STATE, make_inputs, run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashattn_ext import spec
from flashattn_ext.spec_scores import Options

INF = torch.inf


def without_keys(how, rows, seqlen_q, seqlen_k):
    """Options that leave `rows` of every head without a key."""
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    mask[rows] = False
    if how == "mask":
        return {"mask": mask}
    return {"bias": torch.zeros(seqlen_q, seqlen_k).masked_fill(~mask, -INF)}


@pytest.mark.parametrize("how", ["mask", "bias", "causal", "window"])
@pytest.mark.parametrize("with_sink", [False, True])
def test_rows_without_keys(how, with_sink):
    """out = 0, LSE = -inf or the sink, and exactly no gradient in either direction."""
    seqlen_q, seqlen_k = 40, 24
    rows = slice(0, 16)
    if how == "causal":
        options = {"causal": True}
    elif how == "window":  # r = j - i, so the last 16 rows look back past the last key
        options, rows = {"causal": "top_left", "window_size": (0, -1)}, slice(24, 40)
    else:
        options = without_keys(how, rows, seqlen_q, seqlen_k)
    q, k, v, dout, dlse = make_inputs(2, seqlen_q, seqlen_k, 4, 2, 8, 8, torch.float32)
    if with_sink:
        options["sink"] = torch.randn(4)
    else:
        # What a loss that squares LSE sends back: it must not reach anything.
        dlse[:, :, rows] = -INF
        dout[:, rows] = INF
    actual = run(q, k, v, dout, dlse, block_q=16, block_k=8, **options)
    expected_lse = options["sink"][None, :, None].expand(2, 4, 16) if with_sink else -INF
    assert (actual["lse"][:, :, rows] == expected_lse).all()
    assert not actual["out"][:, rows].any()
    assert not actual["dq"][:, rows].any()
    assert all(x.isfinite().all() for name, x in actual.items() if name != "lse")
    finite_dout = dout.nan_to_num(posinf=0.0)
    exact = reference.run(q, k, v, finite_dout, dlse, **options)
    del actual["lse"]
    compare.assert_accurate(actual, exact, dtype=torch.float32, dout=finite_dout, v=v)


def test_no_gradient_from_an_empty_row():
    """dk, dv and the options' gradients are bit for bit those without the row."""
    q, k, v, dout, dlse = make_inputs(1, 9, 6, 2, 1, 8, 8, torch.float32)
    table = torch.randn(2, 5)
    whole = run(q, k, v, dout, dlse, causal=True, rel_bias=table, block_q=3)
    part = run(q[:, 3:], k, v, dout[:, 3:], dlse[:, :, 3:], causal=True, rel_bias=table, block_q=3)
    assert all(torch.equal(whole[name], part[name]) for name in ("dk", "dv", "drel_bias"))


def test_a_key_that_nobody_sees():
    mask = torch.ones(12, dtype=torch.bool)
    mask[[2, 7]] = False
    actual = run(*make_inputs(2, 10, 12, 2, 1, 8, 8, torch.float32), mask=mask)
    assert not actual["dk"][:, ~mask].any()
    assert not actual["dv"][:, ~mask].any()
    assert actual["dk"][:, mask].all()


def test_sink_minus_infinity_is_no_sink():
    inputs = make_inputs(1, 20, 12, 2, 1, 8, 8, torch.float32)
    without = run(*inputs, causal=True)
    with_sink = run(*inputs, causal=True, sink=torch.full((2,), -INF))
    assert not with_sink.pop("dsink").any()
    assert all(torch.equal(with_sink[name], without[name]) for name in without)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", range(8, 257, 56))
def test_one_key(dtype, head_dim):
    """One visible key: out is its value, dv is dout, and dq, dk vanish (flash-attention 334)."""
    q, k, v, dout, _ = make_inputs(1, 1, 1, 1, 1, head_dim, head_dim, dtype)
    q, k, v = 3 * q, 3 * k, 3 * v
    actual = run(q, k, v, dout)
    assert torch.equal(actual["out"], v)
    assert torch.equal(actual["dv"], dout)
    bound = 1e-5 * dout.double().norm() * v.double().norm()
    assert actual["dq"].abs().max() <= bound
    assert actual["dk"].abs().max() <= bound


def test_constant_probabilities():
    """q = 0 makes every row the mean of the values it sees: counts the keys of a window exactly."""
    seqlen, left = 300, 64
    q, k = torch.zeros(1, seqlen, 1, 8), torch.randn(1, seqlen, 1, 8)
    v = torch.arange(seqlen, dtype=torch.float32).view(1, seqlen, 1, 1)
    out, lse = spec.attention_forward(q, k, v, Options(window_left=left, window_right=0))
    seen = torch.arange(seqlen).clamp(max=left) + 1
    torch.testing.assert_close(lse[0, 0].exp(), seen.float())
    first = torch.arange(seqlen) - seen + 1
    torch.testing.assert_close(out[0, :, 0, 0], (first + torch.arange(seqlen)) / 2)


# --- Enormous biases ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lowest_of", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
def test_lowest_float_for_a_whole_row_is_uniform(dtype, lowest_of, with_sink):
    """As PyTorch's math backend: adding finfo.min absorbs the scores, so the row is the mean of v.

    The backward too: LSE cannot hold log(n) beside finfo.min, P = 1/n must come out all the same.
    """
    q, k, v, dout, dlse = make_inputs(2, 12, 20, 4, 2, 8, 8, dtype)
    wide = lse_type(dtype)
    bias = torch.zeros(12, 20, dtype=wide)
    bias[3:6] = torch.finfo(lowest_of).min
    bias[8, :15] = torch.finfo(lowest_of).min  # part of a row: those keys vanish
    options = {"bias": bias}
    if with_sink:
        options["sink"] = torch.full((4,), torch.finfo(torch.float32).min, dtype=wide)
    actual = run(q, k, v, dout, dlse, block_q=5, block_k=7, **options)
    exact = reference.run(q, k, v, dout, dlse, **options)
    if lowest_of == torch.float32 or not with_sink:
        keys = 20 + (with_sink and lowest_of == torch.float32)
        mean = v.double().sum(1, keepdim=True).repeat_interleave(2, dim=2) / keys
        torch.testing.assert_close(
            actual["out"][:, 3:6].double(), mean.expand(-1, 3, -1, -1), rtol=1e-2, atol=1e-2
        )
    assert all(x.isfinite().all() for x in actual.values())
    compare.assert_accurate(actual, exact, dtype=dtype, dout=dout, v=v)


def test_lowest_half_for_a_whole_row_is_the_softmax_of_the_scores():
    """-65504 leaves the scores visible, rounded to fp32's spacing there, 1/256."""
    q, k, v, dout, dlse = make_inputs(1, 6, 30, 2, 1, 16, 16, torch.float16)
    bias = torch.full((6, 30), torch.finfo(torch.float16).min, dtype=torch.float16)
    actual = run(q, k, v, dout, dlse, bias=bias)
    without = reference.run(q, k, v, dout, dlse)
    for name in ("out", "dq", "dk", "dv"):
        error = (actual[name].double() - without[name]).norm() / without[name].norm()
        assert error < 1 / 256, f"{name}: {error}"
    pytorch = F.scaled_dot_product_attention(
        *(x.float().transpose(1, 2) for x in (q, k, v)), attn_mask=bias.float(), enable_gqa=True
    )
    torch.testing.assert_close(actual["out"].float(), pytorch.transpose(1, 2), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("shift", [-1e6, -3e3, 3e3, 1e6])
def test_a_constant_bias_changes_nothing_but_lse(shift):
    """fp64 still resolves the scores beside the shift; the sum of each row of P stays 1."""
    inputs = make_inputs(1, 20, 30, 2, 1, 8, 8, torch.float64)
    plain = run(*inputs)
    shifted = run(*inputs, bias=torch.full((1,), shift, dtype=torch.float64))
    torch.testing.assert_close(shifted["lse"], plain["lse"] + shift)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(shifted[name], plain[name], rtol=1e-7, atol=1e-9)


# --- Zero sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (2, 0, 0)]
)
@pytest.mark.parametrize("with_options", [False, True])
def test_zero_sizes(batch, seqlen_q, seqlen_k, with_options):
    inputs = make_inputs(batch, seqlen_q, seqlen_k, 4, 2, 8, 16, torch.float32)
    options = {}
    if with_options:
        options = {
            "causal": True,
            "softcap": 2.0,
            "bias": torch.randn(seqlen_q, seqlen_k),
            "alibi_slopes": torch.rand(4),
            "rel_bias": torch.randn(4, 3),
            "sink": torch.randn(4),
            "dropout_p": 0.5,
            "rng_state": RNG_STATE,
        }
    actual = run(*inputs, **options)
    assert actual["out"].shape == (batch, seqlen_q, 4, 16)
    assert not actual["out"].any()
    sink = options["sink"] if with_options else torch.full((4,), -INF)
    assert torch.equal(actual["lse"], sink[None, :, None].expand(batch, 4, seqlen_q))
    for name in ("dq", "dk", "dv"):
        assert not actual[name].any()
    if with_options:
        dlse = inputs[4]
        torch.testing.assert_close(actual["dsink"], dlse.sum((0, 2)))
        for name in ("bias", "alibi_slopes", "rel_bias"):
            assert actual["d" + name].shape == options[name].shape
            assert not actual["d" + name].any()


def test_dropout_without_a_state_is_refused():
    q, k, v, *_ = make_inputs(1, 4, 4, 1, 1, 8, 8, torch.float32)
    with pytest.raises(ValueError, match="needs rng_state"):
        spec.attention_forward(q, k, v, Options(dropout_p=0.1))


# --- Memory and time ------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any tensor had that was made inside the block."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return result


def test_no_tensor_of_size_n_squared():
    """2048 queries by 2048 keys are 4 Mi scores; what lives is a tile of at most a quarter Mi."""
    inputs = make_inputs(1, 2048, 2048, 2, 1, 8, 8, torch.float32)
    with LargestTensor() as largest:
        run(*inputs, causal=True, sink=torch.randn(2), rel_bias=torch.randn(2, 65))
    assert largest.numel <= spec.TILE_ELEMENTS


@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.parametrize("causal", [False, True])
def test_within_four_times_of_torch(causal):
    """Processor time of forward and backward against torch's own CPU SDPA at (1, 1024, 8, 64)."""
    q, k, v, dout, _ = make_inputs(1, 1024, 1024, 8, 8, 64, 64, torch.float32)
    out, lse = spec.attention_forward(q, k, v, Options(causal=causal))

    def spec_forward():
        spec.attention_forward(q, k, v, Options(causal=causal))

    def spec_backward():
        spec.attention_backward(dout, None, q, k, v, out, lse, Options(causal=causal))

    leaves = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    torch_out = F.scaled_dot_product_attention(*leaves, is_causal=causal)

    def torch_forward():
        with torch.no_grad():
            F.scaled_dot_product_attention(*leaves, is_causal=causal)

    def torch_backward():
        torch.autograd.grad(torch_out, leaves, dout.transpose(1, 2), retain_graph=True)

    best = {}
    for _ in range(7):  # interleaved, best of each: other processes slow all of them alike
        for call in (spec_forward, torch_forward, spec_backward, torch_backward):
            start = time.process_time()
            call()
            best[call] = min(best.get(call, INF), time.process_time() - start)
    assert best[spec_forward] < 4 * best[torch_forward]
    assert best[spec_backward] < 4 * best[torch_backward]
