"""The specification as the CPU kernels of torch.ops.flashattn_ext: same bits, states, gradients."""

import pytest
import reference
import torch
from cases import lse_type
from spec_runner import GRAD_OPTIONS, RNG_STATE, make_inputs, run, run_varlen

import flashattn_ext
from flashattn_ext import spec

OPS = torch.ops.flashattn_ext
CU_Q, CU_K = torch.tensor([0, 3, 3, 7]).int(), torch.tensor([0, 4, 6, 9]).int()


def tensor_options(batch, heads, seqlen_q, seqlen_k, dtype):
    return {
        "bias": torch.randn(1, heads, seqlen_q, seqlen_k, dtype=dtype),
        "alibi_slopes": torch.rand(batch, heads, dtype=dtype),
        "rel_bias": torch.randn(heads, 5, dtype=dtype),
        "sink": torch.randn(heads, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dense_ops_are_the_specification(dtype):
    inputs = make_inputs(2, 20, 30, 4, 2, 8, 16, dtype)
    q, k, v, dout, dlse = inputs
    tensors = tensor_options(2, 4, 20, 30, lse_type(dtype))
    numbers = {"softcap": 2.0, "causal": True, "dropout_p": 0.3, "rng_state": RNG_STATE}
    expected = run(*inputs, **tensors, **numbers, window_size=(9, -1))
    out, lse, state = OPS.fwd(q, k, v, **tensors, **numbers, window_left=9)
    assert torch.equal(out, expected["out"])
    assert torch.equal(lse, expected["lse"])
    assert torch.equal(state, RNG_STATE)
    grads = OPS.bwd(
        dout, dlse, q, k, v, out, lse, **tensors, **numbers, window_left=9, wanted=[True] * 4
    )
    for name, grad in zip(("q", "k", "v", *GRAD_OPTIONS), grads):
        assert torch.equal(grad, expected["d" + name]), name
        assert grad.is_contiguous()


def test_varlen_ops_are_the_specification():
    q, k, v, dout, dlse = (x[0] for x in make_inputs(1, 7, 9, 4, 2, 8, 16, torch.float32))
    tensors = tensor_options(3, 4, 1, 9, torch.float32)
    key_bias = tensors.pop("bias")[0, :, 0]
    options = {"key_bias": key_bias, "seqused_k": torch.tensor([4, 2, 1]).int(), **tensors}
    expected = run_varlen(q, k, v, CU_Q, CU_K, dout, dlse, causal=True, **options)
    lengths = (CU_Q, CU_K, 4, 4)
    out, lse, state = OPS.varlen_fwd(q, k, v, *lengths, causal=True, **options)
    assert torch.equal(out, expected["out"])
    assert torch.equal(lse, expected["lse"])
    assert state.shape == (0,)
    grads = OPS.varlen_bwd(
        dout, dlse, q, k, v, out, lse, *lengths, causal=True, **options, wanted=[True] * 4
    )
    names = ("q", "k", "v", "key_bias", "alibi_slopes", "rel_bias", "sink")
    for name, grad in zip(names, grads):
        assert torch.equal(grad, expected["d" + name]), name


def test_what_is_not_wanted_comes_back_empty():
    q, k, v, dout, _ = make_inputs(1, 6, 6, 2, 1, 8, 8, torch.float32)
    sink = torch.randn(2)
    out, lse, state = OPS.fwd(q, k, v, sink=sink)
    assert (state.shape, state.dtype) == ((0,), torch.uint64)
    *_, dbias, dslopes, drel_bias, dsink = OPS.bwd(dout, None, q, k, v, out, lse, sink=sink)
    assert [x.shape for x in (dbias, dslopes, drel_bias, dsink)] == [(0,)] * 4


def test_states_are_drawn_from_torchs_generator():
    q, k, v, *_ = make_inputs(1, 6, 6, 2, 1, 8, 8, torch.float32)
    torch.manual_seed(7)
    first, second = (OPS.fwd(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(7)
    again = OPS.fwd(q, k, v, dropout_p=0.5)
    assert torch.equal(first[2], again[2])
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[2], second[2])


def test_a_given_state_is_not_returned_itself():
    q, k, v, *_ = make_inputs(1, 6, 6, 2, 1, 8, 8, torch.float32)
    state = RNG_STATE.clone()
    returned = OPS.fwd(q, k, v, dropout_p=0.5, rng_state=state)[2]
    assert torch.equal(returned, state)
    assert returned.data_ptr() != state.data_ptr()


def test_dropout_mask_explains_the_results():
    """The exported mask, put into the unfused computation, gives out and all gradients."""
    q, k, v, dout, _ = make_inputs(2, 12, 20, 4, 2, 8, 8, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _, mask = flashattn_ext.flash_attn_func(*leaves, 0.4, causal=True, return_attn_probs=True)
    exact = reference.run(q, k, v, dout, causal=True, dropout_p=0.4, dropout_mask=mask)
    torch.testing.assert_close(out, exact["out"])
    for name, grad in zip("qkv", torch.autograd.grad(out, leaves, dout)):
        torch.testing.assert_close(grad, exact["d" + name])


def test_gradcheck_of_the_function():
    """Autograd, ops and specification together, every float tensor at once, out and lse."""
    leaves = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in [(2, 3, 2, 8), (2, 4, 1, 8), (2, 4, 1, 8), (2, 1, 4), (2, 2), (2, 3), (2,)]
    ]

    def call(q, k, v, bias, slopes, table, sink):
        return flashattn_ext.flash_attn_func(
            q, k, v, 0.2, causal=True, softcap=2.0, alibi_slopes=slopes, bias=bias, rel_bias=table,
            sink=sink, rng_state=RNG_STATE, return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, leaves)


def test_gradcheck_of_the_varlen_function():
    leaves = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in [(7, 2, 8), (9, 1, 8), (9, 1, 8), (2, 9), (3, 2), (2, 3), (2,)]
    ]

    def call(q, k, v, key_bias, slopes, table, sink):
        return flashattn_ext.flash_attn_varlen_func(
            q, k, v, CU_Q, CU_K, 4, 4, window_size=(2, 1), key_bias=key_bias, alibi_slopes=slopes,
            rel_bias=table, sink=sink, return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize(
    "pattern", [(1, 1, 6, 9), (2, 1, 1, 9), (1, 4, 6, 9), (1, 1, 1, 9), (6, 1)]
)
def test_only_the_bias_requires_grad(pattern):
    """PyTorch issue 148476: q, k and v do not, and the gradient is summed over what broadcasts."""
    q, k, v, dout, _ = make_inputs(2, 6, 9, 4, 2, 8, 8, torch.float32)
    bias = torch.randn(pattern, requires_grad=True)
    out = flashattn_ext.flash_attn_func(q, k, v, bias=bias, causal=True)
    (dbias,) = torch.autograd.grad(out, bias, dout)
    exact = reference.run(q, k, v, dout, bias=bias.detach(), causal=True)["dbias"]
    torch.testing.assert_close(dbias, exact.float(), rtol=1e-4, atol=1e-5)


def test_gradient_through_lse():
    """flash-attention 889: a loss of lse and out together, with a sink and empty rows."""
    q, k, v, dout, _ = make_inputs(1, 9, 6, 2, 1, 8, 8, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def loss(out, lse):
        seen = lse.masked_fill(lse == -torch.inf, 0.0)
        return (seen**2).mean() * 1e-3 + (out * dout).sum()

    out, lse = flashattn_ext.flash_attn_func(*leaves, causal=True, return_lse=True)
    actual = torch.autograd.grad(loss(out, lse), leaves)
    out, lse, _ = reference.attention(*leaves, causal=True)
    expected = torch.autograd.grad(loss(out, lse), leaves)
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b)


def test_merge_op_is_the_specification():
    (out_a, lse_a), (out_b, lse_b) = (
        run(*make_inputs(1, 6, 5, 2, 1, 8, 8, torch.float32)[:3]).values() for _ in range(2)
    )
    expected = spec.merge(out_a, lse_a, out_b, lse_b)
    for x, y in zip(OPS.merge(out_a, lse_a, out_b, lse_b), expected):
        assert torch.equal(x, y)
        assert x.is_contiguous()


def test_gradcheck_of_merge():
    leaves = [torch.randn(2, 3, 2, 4), torch.randn(2, 2, 3), torch.randn(2, 3, 2, 4)]
    leaves += [torch.randn(2, 2, 3)]
    leaves = [x.double().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(flashattn_ext.merge, leaves)
