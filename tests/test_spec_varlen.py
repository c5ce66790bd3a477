"""Packed sequences: each as if alone, and nothing read or written that no sequence uses."""

import compare
import pytest
import reference
import torch
from cases import cumulative
from spec_runner import RNG_STATE, make_inputs, run, run_varlen

from flashattn_ext.dropout import dropout_mask
from flashattn_ext.spec_varlen import Packing, varlen_forward

NAN, INF = torch.nan, torch.inf


def make_packed(lengths_q, lengths_k, heads_q, heads_k, head_dim, dtype, head_dim_v=None):
    """q, k, v, dout, dlse of packed sequences and their cu_seqlens."""
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    q, k, v, dout, dlse = make_inputs(
        1, total_q, total_k, heads_q, heads_k, head_dim, head_dim_v or head_dim, dtype
    )
    packed = (q[0], k[0], v[0], cumulative(lengths_q), cumulative(lengths_k), dout[0], dlse[0])
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "dout", "dlse")
    return dict(zip(names, packed))


def assert_varlen_matches(packed, **options):
    """Holds the accuracy rule; returns the results."""
    actual = run_varlen(**packed, **options)
    expected = dict(options)
    if "rng_state" in expected:
        lengths = [int(packed[f"cu_seqlens_{x}"].diff().max()) for x in "qk"]
        expected["dropout_mask"] = dropout_mask(
            expected.pop("rng_state"),
            len(packed["cu_seqlens_q"]) - 1,
            packed["q"].shape[1],
            *lengths,
            options["dropout_p"],
        )
    exact = reference.run_varlen(**packed, **expected)
    rule = {"dtype": packed["q"].dtype, "dout": packed["dout"], "v": packed["v"]}
    forward = {name: actual[name] for name in ("out", "lse")}
    compare.assert_accurate(forward, exact, **rule)
    shift = reference.dlse_of_stored_out(exact["out"], actual["out"], packed["dout"])
    exact = reference.run_varlen(**{**packed, "dlse": packed["dlse"] + shift}, **expected)
    backward = {name: x for name, x in actual.items() if name not in forward}
    compare.assert_accurate(backward, exact, **rule)
    return actual


LENGTHS_Q, LENGTHS_K, HQ = [17, 0, 40, 1, 33], [30, 9, 25, 12, 0], 4
MAX_Q, MAX_K, TOTAL_K = max(LENGTHS_Q), max(LENGTHS_K), sum(LENGTHS_K)
OPTIONS = {
    "plain": lambda: {},
    "causal": lambda: {"causal": True},
    "causal_top_left": lambda: {"causal": "top_left"},
    "window": lambda: {"window_size": (4, 3)},
    "softcap": lambda: {"softcap": 2.0},
    "key_bias": lambda: {"key_bias": torch.randn(TOTAL_K)},
    "key_bias_heads": lambda: {"key_bias": torch.randn(HQ, TOTAL_K), "causal": True},
    "mask": lambda: {"mask": torch.rand(5, 1, MAX_Q, MAX_K) < 0.6},
    "mask_keys": lambda: {"mask": torch.rand(MAX_K) < 0.6},
    "block_mask": lambda: {"block_mask": torch.tensor([1, 1, 0, 1, 1]).bool().view(5, 1, 1, 1)},
    "alibi": lambda: {"alibi_slopes": torch.rand(HQ)},
    "alibi_batch": lambda: {"alibi_slopes": torch.rand(5, HQ), "causal": True},
    "rel_bias": lambda: {"rel_bias": torch.randn(HQ, 11)},
    "sink": lambda: {"sink": torch.randn(HQ), "causal": True},
    "dropout": lambda: {"dropout_p": 0.3, "rng_state": RNG_STATE},
    "seqused": lambda: {
        "seqused_q": torch.tensor([17, 0, 12, 0, 30]).int(),
        "seqused_k": torch.tensor([11, 9, 0, 12, 0]).int(),
        "causal": True,
    },
    "everything": lambda: {
        "causal": True,
        "softcap": 3.0,
        "window_size": (20, -1),
        "key_bias": torch.randn(HQ, TOTAL_K),
        "mask": torch.rand(1, HQ, MAX_Q, 1) < 0.8,
        "alibi_slopes": torch.rand(5, HQ),
        "rel_bias": torch.randn(HQ, 7),
        "sink": torch.randn(HQ),
        "dropout_p": 0.2,
        "rng_state": RNG_STATE,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_option(name, dtype):
    packed = make_packed(LENGTHS_Q, LENGTHS_K, HQ, 2, 16, dtype, head_dim_v=24)
    assert_varlen_matches(packed, **OPTIONS[name]())


def test_equals_the_dense_batch():
    """Sequences of one length give the bits of the dense call, dropout included."""
    batch, seqlen_q, seqlen_k = 3, 20, 30
    inputs = make_inputs(batch, seqlen_q, seqlen_k, 4, 2, 8, 8, torch.float64)
    options = {"causal": True, "dropout_p": 0.3, "rng_state": RNG_STATE}
    dense = run(*inputs, **options)
    q, k, v, dout, dlse = inputs
    packed = run_varlen(
        *(x.flatten(0, 1) for x in (q, k, v)),
        cumulative([seqlen_q] * batch),
        cumulative([seqlen_k] * batch),
        dout.flatten(0, 1),
        dlse.transpose(0, 1).flatten(1),
        **options,
    )
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(packed[name], dense[name].flatten(0, 1))
    torch.testing.assert_close(packed["lse"], dense["lse"].transpose(0, 1).flatten(1))


def test_unused_rows_are_not_read():
    """NaN before the first sequence, behind the last and behind seqused; zeros come out there."""
    lengths_q, lengths_k, used_q, used_k = [10, 12], [9, 20], [6, 12], [9, 5]
    packed = make_packed([3, *lengths_q, 5], [2, *lengths_k, 7], 4, 2, 8, torch.float32)
    packed["cu_seqlens_q"] = 3 + cumulative(lengths_q)
    packed["cu_seqlens_k"] = 2 + cumulative(lengths_k)
    rows, keys = torch.zeros(30, dtype=torch.bool), torch.zeros(38, dtype=torch.bool)
    for first, length in zip(packed["cu_seqlens_q"], used_q):
        rows[first : first + length] = True
    for first, length in zip(packed["cu_seqlens_k"], used_k):
        keys[first : first + length] = True
    key_bias = torch.randn(38)
    for x, used in zip(
        (*(packed[n] for n in ("q", "dout", "k", "v")), key_bias), [rows] * 2 + [keys] * 3
    ):
        x[~used] = NAN
    packed["dlse"][:, ~rows] = NAN
    actual = run_varlen(
        **packed,
        key_bias=key_bias,
        seqused_q=torch.tensor(used_q).int(),
        seqused_k=torch.tensor(used_k).int(),
        causal=True,
    )
    assert all(x.isfinite().all() for name, x in actual.items() if name != "lse")
    assert (actual["lse"][:, ~rows] == -INF).all()
    for name, used in {"out": rows, "dq": rows, "dk": keys, "dv": keys, "dkey_bias": keys}.items():
        assert not actual[name][~used].any()
        assert actual[name][used].any()


def test_lengths_are_clamped_to_the_tensors():
    """Values beyond the rows there are, or that run backwards, mean the rows there are."""
    packed = make_packed([6, 8], [6, 8], 2, 1, 8, torch.float32)
    expected = run_varlen(**packed)
    packed["cu_seqlens_q"] = torch.tensor([-5, 6, 1000]).int()
    packed["cu_seqlens_k"] = torch.tensor([0, 6, 99]).int()
    actual = run_varlen(**packed, seqused_k=torch.tensor([1000, 1000]).int())
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    packed["cu_seqlens_q"] = torch.tensor([6, 2, 14]).int()
    assert run_varlen(**packed)["out"].isfinite().all()


def test_no_sequence_is_longer_than_max_seqlen():
    q, k, v, *_ = (x[0] for x in make_inputs(1, 10, 12, 2, 1, 8, 8, torch.float32))
    cu_seqlens_q, cu_seqlens_k = cumulative([10]), cumulative([12])
    out, lse = varlen_forward(q, k, v, Packing(cu_seqlens_q, cu_seqlens_k, 7, 5))
    expected = run(q[None, :7], k[None, :5], v[None, :5])
    assert torch.equal(out[:7], expected["out"][0])
    assert not out[7:].any()
    assert (lse[:, 7:] == -INF).all()


def test_no_tokens():
    packed = make_packed([0, 0], [0, 0], 2, 1, 8, torch.float32)
    actual = run_varlen(**packed, sink=torch.randn(2), causal=True)
    assert actual["out"].shape == (0, 2, 8)
    assert actual["lse"].shape == (2, 0)
    assert torch.equal(actual["dsink"], torch.zeros(2))


def test_no_sequences():
    packed = make_packed([], [], 2, 1, 8, torch.float32)
    assert run_varlen(**packed)["dk"].shape == (0, 1, 8)


# --- Cases users of other libraries reported ------------------------------------------------------


def test_each_sequence_longer_than_its_keys():
    """flash-attention 443: one key per sequence, causal; only the last query of each sees it."""
    packed = make_packed([76, 34, 146], [1, 1, 1], 1, 1, 32, torch.float16)
    for name in ("q", "k", "v"):
        packed[name] *= 3
    packed["dout"].fill_(1.0)
    packed["dlse"] = None
    actual = run_varlen(**packed, causal=True)
    last = packed["cu_seqlens_q"][1:].long() - 1
    others = torch.ones(256, dtype=torch.bool).index_fill_(0, last, False)
    assert torch.equal(actual["out"][last], packed["v"])
    assert not actual["out"][others].any()
    assert (actual["lse"][:, others] == -INF).all()
    assert not actual["dq"][others].any()
    bound = 1e-5 * 32**0.5 * packed["v"].float().norm(dim=-1).max()
    assert actual["dq"].abs().max() <= bound
    assert actual["dk"].abs().max() <= bound
    assert torch.equal(actual["dv"], packed["dout"][last])


def test_one_query_each_and_an_empty_sequence():
    """flash-attention 1537: lengths 1, 0, 1 against 3, 0, 5, three query heads to a key head."""
    packed = make_packed([1, 0, 1], [3, 0, 5], 9, 3, 64, torch.bfloat16)
    assert_varlen_matches(packed, causal=True, softmax_scale=1.0)


def test_fewer_tokens_than_sequences():
    """flash-attention 1619: four sequences, one token, which attends to itself."""
    packed = make_packed([0, 0, 0, 1], [0, 0, 0, 1], 21, 7, 120, torch.bfloat16)
    actual = run_varlen(**packed, softmax_scale=120**0.5)
    assert torch.equal(actual["out"], packed["v"].repeat_interleave(3, dim=1))


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_without_queries(causal):
    """flash-attention 2562, shortened: keys of sequences that have no queries get no gradient."""
    packed = make_packed([0, 61, 42, 0], [127, 87, 42, 153], 4, 1, 64, torch.bfloat16)
    actual = assert_varlen_matches(packed, causal=causal)
    for name in ("dk", "dv"):
        assert not actual[name][:127].any()
        assert not actual[name][256:].any()


def test_sequence_without_keys():
    """flash-attention 2842: its rows are -inf and 0, its neighbours' LSE stay where they are."""
    packed = make_packed([3, 4, 5], [7, 0, 9], 2, 2, 64, torch.bfloat16)
    actual = assert_varlen_matches(packed)
    assert (actual["lse"][:, 3:7] == -INF).all()
    assert not actual["out"][3:7].any()
    assert actual["lse"][:, :3].isfinite().all()
    assert actual["lse"][:, 7:].isfinite().all()
