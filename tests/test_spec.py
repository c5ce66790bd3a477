"""The specification against the dense unfused computation, option by option, and by hand."""

import compare
import pytest
import reference
import torch
from cases import lse_type
from spec_runner import RNG_STATE, for_reference, make_inputs, run

from flashattn_ext import spec
from flashattn_ext.spec_scores import Options

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
B, SQ, SK, HQ, HK, D, DV = 2, 70, 90, 6, 2, 16, 24


def random_mask(*shape):
    return torch.rand(shape) < 0.6


# Every option alone, every broadcast of the bias, then the combinations that meet in one formula.
# Each entry makes its tensors anew, in fp64 or, for the narrower types, fp32.
OPTIONS = {
    "plain": lambda f: {},
    "scale": lambda f: {"softmax_scale": 0.7},
    "scale_negative": lambda f: {"softmax_scale": -0.3},
    "causal": lambda f: {"causal": True},
    "causal_top_left": lambda f: {"causal": "top_left"},
    "window": lambda f: {"window_size": (10, 5)},
    "window_left_only": lambda f: {"window_size": (10, -1)},
    "window_right_only": lambda f: {"window_size": (-1, 3)},
    "window_self": lambda f: {"window_size": (0, 0)},
    "causal_window": lambda f: {"causal": True, "window_size": (17, -1)},
    "top_left_window": lambda f: {"causal": "top_left", "window_size": (17, 9)},
    "softcap": lambda f: {"softcap": 1.5},
    "bias_full": lambda f: {"bias": torch.randn(B, HQ, SQ, SK, dtype=f)},
    "bias_1hss": lambda f: {"bias": torch.randn(1, HQ, SQ, SK, dtype=f)},
    "bias_b1ss": lambda f: {"bias": torch.randn(B, 1, SQ, SK, dtype=f)},
    "bias_ss": lambda f: {"bias": torch.randn(SQ, SK, dtype=f)},
    "bias_b11s": lambda f: {"bias": torch.randn(B, 1, 1, SK, dtype=f)},
    "bias_s": lambda f: {"bias": torch.randn(SK, dtype=f)},
    "bias_hs1": lambda f: {"bias": torch.randn(HQ, SQ, 1, dtype=f)},
    "bias_expanded": lambda f: {"bias": torch.randn(1, HQ, 1, SK, dtype=f).expand(B, HQ, SQ, SK)},
    "bias_transposed": lambda f: {"bias": torch.randn(HQ, SK, SQ, dtype=f).mT},
    "bias_softcap": lambda f: {"bias": torch.randn(SQ, SK, dtype=f), "softcap": 1.5},
    "mask_full": lambda f: {"mask": random_mask(B, HQ, SQ, SK)},
    "mask_keys": lambda f: {"mask": random_mask(B, 1, 1, SK)},
    "mask_rows": lambda f: {"mask": random_mask(1, HQ, SQ, 1)},
    "mask_bias_causal": lambda f: {
        "mask": random_mask(SQ, SK),
        "bias": torch.randn(1, 1, SQ, SK, dtype=f),
        "causal": True,
    },
    "alibi": lambda f: {"alibi_slopes": torch.rand(HQ, dtype=f)},
    "alibi_batch_top_left": lambda f: {
        "alibi_slopes": torch.rand(B, HQ, dtype=f),
        "causal": "top_left",
    },
    "rel_bias": lambda f: {"rel_bias": torch.randn(HQ, 21, dtype=f)},
    "rel_bias_one": lambda f: {"rel_bias": torch.randn(HQ, 1, dtype=f)},
    "rel_bias_causal_sink": lambda f: {
        "rel_bias": torch.randn(HQ, 9, dtype=f),
        "causal": True,
        "sink": torch.randn(HQ, dtype=f),
    },
    "sink": lambda f: {"sink": torch.tensor([-3.0, 0.0, 1.0, 2.0, 5.0, -1.0], dtype=f)},
    "sink_column_bias": lambda f: {
        "sink": torch.randn(HQ, dtype=f),
        "bias": torch.randn(SQ, 1, dtype=f),
    },
    "sink_softcap_window": lambda f: {
        "sink": torch.randn(HQ, dtype=f),
        "softcap": 2.0,
        "window_size": (8, 8),
    },
    "block_mask": lambda f: {"block_mask": torch.tensor([True, False]).repeat(3).view(1, HQ, 1, 1)},
    "dropout": lambda f: {"dropout_p": 0.3, "rng_state": RNG_STATE},
    "dropout_everything": lambda f: {
        "dropout_p": 0.2,
        "rng_state": RNG_STATE,
        "causal": True,
        "window_size": (40, -1),
        "softcap": 3.0,
        "bias": torch.randn(HQ, 1, SK, dtype=f),
        "mask": random_mask(B, 1, SQ, SK),
        "alibi_slopes": torch.rand(HQ, dtype=f),
        "rel_bias": torch.randn(HQ, 7, dtype=f),
        "sink": torch.randn(HQ, dtype=f),
    },
}


def assert_spec_matches(inputs, options, block_q=None, block_k=None):
    """Forward and backward of the specification hold the accuracy rule."""
    q, k, v, dout, _ = inputs
    actual = run(*inputs, block_q=block_q, block_k=block_k, **options)
    expected = for_reference(options, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    exact = reference.run(*inputs, **expected)
    eager = reference.run(*inputs, same_dtype=True, **expected)
    rule = {"dtype": q.dtype, "dout": dout, "v": v}
    # The largest of a handful of fp32 errors is luck: a gradient of one number per head is held to
    # the relative criterion alone there, which is the tighter one.
    few = (
        {} if q.dtype.itemsize == 2 else {name: x for name, x in actual.items() if x.numel() < 1000}
    )
    compare.assert_accurate(few, exact, **rule)
    many = {name: x for name, x in actual.items() if name not in few}
    compare.assert_accurate(many, exact, eager, **rule)
    return actual


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", OPTIONS)
def test_option(name, dtype):
    inputs = make_inputs(B, SQ, SK, HQ, HK, D, DV, dtype)
    # Blocks that divide nothing: every tile has its own share of mask and tail.
    assert_spec_matches(inputs, OPTIONS[name](lse_type(dtype)), block_q=32, block_k=48)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_bias_in_the_type_of_the_inputs(dtype):
    inputs = make_inputs(B, SQ, SK, HQ, HK, D, DV, dtype)
    actual = assert_spec_matches(inputs, {"bias": torch.randn(1, HQ, SQ, SK).to(dtype)})
    assert actual["dbias"].dtype == dtype


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 14])
@pytest.mark.parametrize("causal", [False, True])
def test_query_heads_share_key_heads(group, causal):
    inputs = make_inputs(2, 20, 33, 2 * group, 2, 8, 8, torch.float32)
    assert_spec_matches(inputs, {"causal": causal}, block_q=16, block_k=16)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(8, 8), (40, 8), (8, 72), (64, 64), (72, 104), (192, 128), (256, 256)],
)
def test_head_dims(head_dim, head_dim_v):
    inputs = make_inputs(1, 40, 50, 2, 1, head_dim, head_dim_v, torch.bfloat16)
    assert_spec_matches(inputs, {"causal": True})


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 1), (1, 50), (50, 1), (33, 47), (47, 33), (2, 5), (5, 2), (64, 64)],
)
def test_lengths(seqlen_q, seqlen_k, causal):
    inputs = make_inputs(2, seqlen_q, seqlen_k, 2, 1, 8, 8, torch.float32)
    assert_spec_matches(inputs, {"causal": causal}, block_q=16, block_k=16)


def test_block_mask_switches_tiles_of_128():
    inputs = make_inputs(1, 300, 260, 2, 1, 8, 8, torch.float32)
    block_mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]]).bool().expand(1, 1, 3, 3)
    actual = assert_spec_matches(inputs, {"block_mask": block_mask}, block_q=64, block_k=96)
    assert actual["lse"][:, :, 128:256].eq(-torch.inf).all()
    fewer_dims = run(*inputs, block_q=64, block_k=96, block_mask=block_mask[0, 0])
    assert all(torch.equal(fewer_dims[name], actual[name]) for name in actual)
    rows_alike = run(*inputs, block_mask=torch.tensor([[True, False, True]]))
    by_pairs = torch.ones(260).bool()
    by_pairs[128:256] = False
    for name, expected in run(*inputs, mask=by_pairs).items():
        assert torch.equal(rows_alike[name], expected)


def test_strides_do_not_matter():
    """Transposed, expanded and sliced inputs give the bits of their contiguous copies."""
    heads, seqlen, head_dim = 4, 30, 8
    fused = torch.randn(2, seqlen, 3, heads, head_dim)
    q, k, v = fused[:, :, 0], fused[:, :, 1, :1].expand(-1, -1, 2, -1), fused[:, :, 2, ::2]
    dout = torch.ones(()).expand(2, seqlen, heads, head_dim)
    strided = run(q, k, v, dout, causal=True)
    contiguous = run(*(x.contiguous() for x in (q, k, v, dout)), causal=True)
    assert all(torch.equal(strided[name], contiguous[name]) for name in strided)


def test_peaky_inputs():
    """One channel fifty times the others and correlated rows: nearly one-hot rows of P."""
    q, k, v, dout, dlse = make_inputs(2, 64, 64, 4, 2, 32, 32, torch.float32)
    q[..., 3] *= 50
    k[:, 1::2] = k[:, ::2] + 0.01 * k[:, 1::2]
    assert_spec_matches((q, k, v, dout, dlse), {"causal": True}, block_q=32, block_k=16)


def test_scores_far_from_zero():
    """A constant of -128 on every score leaves P as it is and moves LSE (cuDNN frontend 1072)."""
    q, k, v, dout, dlse = make_inputs(1, 1, 128, 2, 2, 64, 64, torch.bfloat16)
    q[..., 0], k[..., 0] = 32.0, -32.0  # -1024 / 8 on every score
    actual = run(q, k, v, dout, dlse)
    assert actual["lse"].max() < -100
    exact = reference.run(q, k, v, dout, dlse)
    # dq adds dS * k over keys that share a large component: what dS sums to decides, and that is
    # the rounding of the stored out. The rule holds for the gradient that belongs to this out.
    shift = reference.dlse_of_stored_out(exact["out"], actual["out"], dout)
    from_stored_out = reference.run(q, k, v, dout, dlse + shift)
    rule = {"dtype": q.dtype, "dout": dout, "v": v}
    compare.assert_accurate({"out": actual.pop("out"), "lse": actual.pop("lse")}, exact, **rule)
    compare.assert_accurate(actual, from_stored_out, **rule)


# --- The worked example, and what tiling must not change -----------------------------------------

HAND_Q = torch.tensor([1.0, 0.0], dtype=torch.float64)
HAND_K = torch.tensor([[1, 0], [0, 1], [3, 1], [-1, 1]], dtype=torch.float64)
HAND_V = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=torch.float64)


def hand_trace(block):
    """The states (m, l, O) of the worked example, the initial one first."""
    tiles = [
        ((K_j @ HAND_Q).view(1, 1, 1, -1), V_j[None, None], None)
        for K_j, V_j in zip(HAND_K.split(block), HAND_V.split(block))
    ]
    column = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    start = spec.State(column - torch.inf, column, torch.zeros(1, 1, 1, 2, dtype=torch.float64))
    return [
        (m.item(), l.item(), O.flatten().tolist())
        for m, l, O in spec.online_softmax_steps(tiles, start)
    ]


def test_hand_trace():
    start, first, second = hand_trace(block=2)
    assert start == (-torch.inf, 0.0, [0.0, 0.0])
    assert first == (
        1.0,
        pytest.approx(1.3679, abs=5e-5),
        pytest.approx([2.1036, 3.4715], abs=1e-4),
    )
    assert second[0] == 3.0
    assert second[1] == pytest.approx(1.20344, abs=5e-6)
    assert second[2] == pytest.approx([5.4129, 6.6164], abs=1e-4)
    assert [x / second[1] for x in second[2]] == pytest.approx([4.49786861, 5.49786861], abs=5e-9)


def test_hand_trace_in_one_block():
    _, (m, l, O) = hand_trace(block=4)
    assert (m, l, O) == (
        3.0,
        pytest.approx(hand_trace(2)[2][1]),
        pytest.approx(hand_trace(2)[2][2]),
    )


@pytest.mark.parametrize("block_k", [1, 2, 3, 4])
def test_hand_trace_through_attention_forward(block_k):
    q, k, v = HAND_Q.view(1, 1, 1, 2), HAND_K.view(1, 4, 1, 2), HAND_V.view(1, 4, 1, 2)
    out, lse = spec.attention_forward(q, k, v, Options(softmax_scale=1.0), block_k=block_k)
    assert out.flatten().tolist() == pytest.approx([4.49786861, 5.49786861], abs=5e-9)
    assert lse.item() == pytest.approx(3 + torch.tensor(1.20344).log().item(), abs=1e-5)


@pytest.mark.parametrize(
    "name", ["causal", "bias_1hss", "rel_bias_causal_sink", "dropout_everything"]
)
@pytest.mark.parametrize(("block_q", "block_k"), [(1, 90), (70, 1), (7, 13), (64, 16), (128, 128)])
def test_block_sizes_change_only_rounding(name, block_q, block_k):
    inputs = make_inputs(B, SQ, SK, HQ, HK, D, DV, torch.float64)
    options = OPTIONS[name](torch.float64)
    one_tile = run(*inputs, block_q=SQ, block_k=SK, **options)
    tiled = run(*inputs, block_q=block_q, block_k=block_k, **options)
    for result, expected in one_tile.items():
        torch.testing.assert_close(tiled[result], expected, rtol=1e-11, atol=1e-12)


def test_equivalent_forms_give_the_same_bits():
    inputs = make_inputs(1, 60, 60, 2, 1, 8, 8, torch.float32)
    forms = [
        {"causal": True},
        {"window_size": (-1, 0)},
        {"window_size": (59, 0)},
        {"window_size": (60, 0)},
        {"causal": True, "window_size": (-1, 7)},
        {"causal": "top_left"},
    ]
    first, *others = [run(*inputs, block_q=16, block_k=16, **form) for form in forms]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_decoded_row_is_the_row_of_the_prefill():
    """Bottom-right alignment: the last queries alone see what they saw among all."""
    slopes, table = torch.rand(2, dtype=torch.float64), torch.randn(2, 9, dtype=torch.float64)
    q, k, v, *_ = make_inputs(1, 40, 40, 2, 1, 8, 8, torch.float64)
    for option in (
        {"causal": True},
        {"window_size": (6, 2)},
        {"alibi_slopes": slopes},
        {"rel_bias": table},
    ):
        whole = run(q, k, v, **option)["out"][:, -3:]
        torch.testing.assert_close(run(q[:, -3:], k, v, **option)["out"], whole)


# --- Gradients by finite differences: independent of any reference -------------------------------


class SpecAttention(torch.autograd.Function):
    """The specification with its own backward, as autograd sees it."""

    @staticmethod
    def forward(ctx, options, names, q, k, v, *tensors):
        chosen = {**options, **dict(zip(names, tensors))}
        result = run(q, k, v, block_q=2, block_k=2, **chosen)
        ctx.options, ctx.names = options, names
        ctx.save_for_backward(q, k, v, *tensors)
        return result["out"], result["lse"]

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, *tensors = ctx.saved_tensors
        chosen = {**ctx.options, **dict(zip(ctx.names, tensors))}
        result = run(q, k, v, dout, dlse, block_q=2, block_k=2, **chosen)
        return None, None, *(result["d" + name] for name in ("q", "k", "v", *ctx.names))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"causal": True, "softcap": 1.0}, []),
        ({"window_size": (2, 0)}, ["sink"]),
        ({"dropout_p": 0.4, "rng_state": RNG_STATE}, ["bias"]),
        ({"causal": True}, ["bias", "sink"]),
        ({"causal": "top_left", "softcap": 2.0}, ["alibi_slopes", "rel_bias"]),
        (
            {"causal": True, "softcap": 2.0, "dropout_p": 0.3, "rng_state": RNG_STATE},
            ["bias", "alibi_slopes", "rel_bias", "sink"],
        ),
    ],
)
def test_gradcheck(options, names):
    shapes = {"bias": (2, 1, 5), "alibi_slopes": (2, 2), "rel_bias": (2, 3), "sink": (2,)}
    tensors = [torch.randn(2, 3, 2, 4), torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 3)]
    tensors += [torch.randn(shapes[name]) for name in names]
    leaves = [x.double().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(lambda *x: SpecAttention.apply(options, names, *x), leaves)
