"""Forward without a graph: out and lse against the fp64 reference, and what the options mean.

Every body runs on the CPU path and, marked `gpu`, on the CUDA path; the CPU runs reduced sizes.
"""

import math

import compare
import harness
import pytest
import torch
from cases import (
    EVERY_HEAD_DIM,
    HALF_TYPES,
    SEQLENS,
    Case,
    Options,
    make_tensors,
    pairwise,
    type_name,
)

import flashattn_ext
from flashattn_ext import flash_attn_func


def check_forward(case, device, plan=None):
    case = case.on(device)
    x = make_tensors(case, device)
    options = case.options.kwargs()
    with torch.no_grad():
        out, lse = harness.attend(x, options, plan)
    compare.assert_accurate(
        {"out": out, "lse": lse},
        harness.expected(x, options),
        harness.expected(x, options, same_dtype=True),
        dtype=case.dtype,
    )


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
@pytest.mark.parametrize("head_dim", EVERY_HEAD_DIM)
def test_every_head_dim(device_plan, head_dim, dtype):
    case = Case(
        head_dim=head_dim, dtype=dtype, seqlen_q=77, seqlen_k=133, options=Options(causal=True)
    )
    check_forward(case, *device_plan)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "keys"),
    [(64, 1024), (64, 1025), (64, 4096), (64, 4097), (128, 768), (128, 769)],
)
def test_lengths_at_which_tiles_change(device_plan, head_dim, keys, causal):
    """On Hopper, head dims 64 and 128 have tiles for short and for long sequences."""
    case = Case(head_dim=head_dim, seqlen_q=300, seqlen_k=keys, options=Options(causal=causal))
    check_forward(case, *device_plan)


# Where the queries of one tile end or begin to see a block of keys in which others see something:
# their consumers leave it out, ahead of their first block or behind their last.
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
@pytest.mark.parametrize(
    ("window_size", "seqlens"),
    [
        ((-1, 0), (700, 700)),
        ((-1, 0), (700, 731)),
        ((-1, 0), (700, 100)),  # most queries see nothing
        ((-1, 0), (130, 1500)),
        ((100, 0), (900, 900)),
        ((63, 0), (700, 763)),
        ((0, 0), (500, 500)),
        ((130, 70), (900, 1000)),
        ((0, 200), (600, 300)),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_blocks_that_a_part_of_a_tile_sees(device_plan, head_dim, window_size, seqlens, dtype):
    case = Case(
        head_dim=head_dim,
        dtype=dtype,
        seqlen_q=seqlens[0],
        seqlen_k=seqlens[1],
        options=Options(window_size=window_size),
    )
    check_forward(case, *device_plan)


def test_blocks_that_a_part_of_a_long_tile_sees(device_plan):
    """Three consumers of 64 queries and blocks of 128 keys, at head dim 64."""
    for window_size in ((-1, 0), (2000, 0), (5000, 50)):
        options = Options(window_size=window_size)
        case = Case(head_dim=64, seqlen_q=500, seqlen_k=4500, options=options)
        check_forward(case, *device_plan)


SHAPES = [
    Case(
        head_dim=row["head_dim"],
        seqlen_q=row["seqlens"][0],
        seqlen_k=row["seqlens"][1],
        heads_q=row["heads"][0],
        heads_k=row["heads"][1],
        dtype=row["dtype"],
        options=Options(causal=row["causal"]),
    )
    for row in pairwise(
        seqlens=SEQLENS,
        head_dim=(32, 64, 128, 256),
        causal=(False, True, "top_left"),
        heads=((2, 2), (6, 2), (4, 1)),
        dtype=HALF_TYPES,
    )
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(device_plan, case):
    check_forward(case, *device_plan)


@pytest.mark.parametrize("options", [Options(causal=True), Options(window_size=(90, 40))], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_tiles(device, head_dim, options):
    """More than a GPU has SMs, and of unequal work: each is computed once."""
    case = Case(
        head_dim=head_dim,
        seqlen_q=520,
        seqlen_k=600,
        batch=7,
        heads_q=16,
        heads_k=4,
        options=options,
    )
    check_forward(case, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=type_name)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_wide_types_on_the_cpu(dtype, causal):
    case = Case(dtype=dtype, seqlen_q=70, seqlen_k=100, options=Options(causal=causal))
    check_forward(case, "cpu")


@pytest.mark.parametrize("scale", [0.0, 0.02, 1.0, -0.1])
def test_softmax_scale(device_plan, scale):
    check_forward(Case(options=Options(softmax_scale=scale), seqlen_q=100), *device_plan)


def test_hand_traced_row(device):
    """One query over four keys in two blocks of two: the example of the texts."""
    dtype = torch.float64 if device == "cpu" else torch.float16

    def tensor(rows):  # the zero channels change neither the scores nor the first two
        wide = torch.zeros(1, len(rows), 1, 8, dtype=dtype, device=device)
        wide[0, :, 0, :2] = torch.tensor(rows, dtype=dtype)
        return wide

    q = tensor([[1, 0]])
    k = tensor([[1, 0], [0, 1], [3, 1], [-1, 1]])
    v = tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    out, lse = flash_attn_func(q, k, v, softmax_scale=1.0, return_lse=True)
    wanted = torch.tensor([4.49786861, 5.49786861], dtype=torch.float64)
    tolerance = 1e-8 if dtype == torch.float64 else 5e-3
    assert torch.allclose(out[0, 0, 0, :2].double().cpu(), wanted, rtol=0, atol=tolerance)
    assert math.isclose(lse.item(), 3 + math.log(1.20344), abs_tol=1e-5)


def visible_keys(device, seqlen_q, seqlen_k, dtype=torch.float16, **options):
    """(Sq, Sk) weights, read off one-hot values; equal scores make each weight 1 / count."""
    dim = 64
    q = torch.zeros(1, seqlen_q, 1, dim, dtype=dtype, device=device)
    k = torch.zeros(1, seqlen_k, 1, dim, dtype=dtype, device=device)
    parts = []
    for start in range(0, seqlen_k, dim):
        v = torch.zeros(1, seqlen_k, 1, dim, dtype=dtype, device=device)
        stop = min(start + dim, seqlen_k)
        v[0, range(start, stop), 0, range(stop - start)] = 1
        parts.append(flash_attn_func(q, k, v, **options)[0, :, 0, : stop - start])
    return torch.cat(parts, dim=1).double().cpu()


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "options"),
    [
        (2, 5, {"causal": True}),
        (2, 5, {"causal": "top_left"}),
        (5, 2, {"causal": True}),
        (5, 2, {"causal": "top_left"}),
        (7, 7, {"window_size": (2, 0)}),
        (7, 9, {"window_size": (1, 3)}),
        (9, 7, {"window_size": (0, 0)}),
        (70, 130, {"causal": True, "window_size": (65, -1)}),
        (70, 130, {"causal": "top_left", "window_size": (3, 5)}),
        (130, 70, {"window_size": (-1, 2)}),
        (130, 70, {"window_size": (2, -1)}),
    ],
    ids=str,
)
def test_which_keys_a_row_sees(device, seqlen_q, seqlen_k, options):
    """-left <= j - (i + off) <= right, inclusive; off = Sk - Sq, or 0 for top_left."""
    weights = visible_keys(device, seqlen_q, seqlen_k, **options)
    off = 0 if options.get("causal") == "top_left" else seqlen_k - seqlen_q
    left, right = options.get("window_size", (-1, -1))
    for i in range(seqlen_q):
        seen = [
            j
            for j in range(seqlen_k)
            if (left < 0 or j - i - off >= -left)
            and (right < 0 or j - i - off <= right)
            and (not options.get("causal") or j <= i + off)
        ]
        row = torch.zeros(seqlen_k, dtype=torch.float64)
        row[seen] = 1 / max(len(seen), 1)
        assert torch.allclose(weights[i], row, rtol=0, atol=1e-3), f"row {i}"
        assert torch.equal(weights[i] > 0, row > 0), f"row {i} sees other keys than {seen}"


WINDOWS = [
    Options(causal=causal, window_size=window, softcap=softcap)
    for causal, window, softcap in (
        (False, (16, 16), 0.0),
        (False, (0, 0), 0.0),
        (False, (-1, 5), 0.0),
        (False, (100, -1), 0.0),
        (True, (63, -1), 0.0),
        (True, (64, 0), 0.0),
        (True, (65, 7), 0.0),
        ("top_left", (30, 30), 0.0),
        (False, (300, 300), 0.0),
        (False, (-1, -1), 1.0),
        (True, (-1, -1), 20.0),
        (True, (50, -1), 5.0),
        ("top_left", (-1, -1), 30.0),
    )
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", WINDOWS, ids=str)
def test_windows_and_softcap(device_plan, options, head_dim):
    for seqlen_q, seqlen_k in ((200, 200), (113, 303), (303, 113)):
        case = Case(
            head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=1, options=options
        )
        check_forward(case, *device_plan)


def test_equivalent_masks_give_the_same_bits(device):
    x = make_tensors(Case(seqlen_q=130, seqlen_k=130, batch=1), device)
    forms = (
        {"causal": True},
        {"window_size": (-1, 0)},
        {"window_size": (130, 0)},
        {"window_size": (129, 0)},
        {"causal": True, "window_size": (-1, 50)},
        {"causal": "bottom_right"},
    )
    wanted = flash_attn_func(x.q, x.k, x.v, causal=True, return_lse=True)
    for options in forms:
        out, lse = flash_attn_func(x.q, x.k, x.v, **options, return_lse=True)
        assert torch.equal(out, wanted[0]), options
        assert torch.equal(lse, wanted[1]), options
    full = flash_attn_func(x.q, x.k, x.v)
    assert torch.equal(flash_attn_func(x.q, x.k, x.v, window_size=(129, 129)), full)
    assert torch.equal(flash_attn_func(x.q, x.k, x.v, window_size=(129, -1)), full)


def test_packed_forms_equal_the_plain_one(device):
    case = Case(heads_q=3, heads_k=3, seqlen_q=100, seqlen_k=100)
    x = make_tensors(case, device)
    wanted = flash_attn_func(x.q, x.k, x.v, causal=True)
    qkv = torch.stack([x.q, x.k, x.v], dim=2)
    kv = torch.stack([x.k, x.v], dim=2)
    assert torch.equal(flashattn_ext.flash_attn_qkvpacked_func(qkv, causal=True), wanted)
    assert torch.equal(flashattn_ext.flash_attn_kvpacked_func(x.q, kv, causal=True), wanted)


def test_return_attn_probs_gives_three_values(device):
    x = make_tensors(Case(seqlen_q=20, seqlen_k=20), device)
    out, lse, mask = flash_attn_func(x.q, x.k, x.v, return_attn_probs=True)
    assert mask is None, "no dropout, so no mask"
    assert torch.equal(out, flash_attn_func(x.q, x.k, x.v))
    assert lse.shape == (2, 4, 20)
    assert lse.dtype == torch.float32


def test_lse_is_natural(device):
    """Against torch.logsumexp of the scores; a base-2 value would be off by a factor ln 2."""
    x = make_tensors(Case(seqlen_q=40, seqlen_k=90, heads_k=4, batch=1), device)
    _, lse = flash_attn_func(x.q, x.k, x.v, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bhij", x.q.double(), x.k.double()) / math.sqrt(64)
    wanted = torch.logsumexp(scores, dim=-1)
    assert torch.allclose(lse.double(), wanted, rtol=0, atol=1e-5)
    assert abs((lse.double() / wanted).median().item() - 1) < 1e-4


def test_one_huge_score_takes_the_row(device):
    """A score hundreds above the others: out is that key's value exactly, lse is that score."""
    q = torch.zeros(1, 70, 2, 64, dtype=torch.float16, device=device)
    k = torch.zeros(1, 150, 2, 64, dtype=torch.float16, device=device)
    v = torch.randn(1, 150, 2, 64, device=device).half()
    q[..., 0], k[:, 101, :, 0] = 64, 64
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert torch.equal(out, v[:, 101:102].expand_as(out))
    assert (lse - 512).abs().max() <= 2e-5 + 1e-6 * 512


def test_integers_are_exact(device):
    """Equal scores over 2^n keys and small integer values: sums and means have no rounding."""
    q = torch.zeros(1, 33, 1, 64, dtype=torch.float16, device=device)
    k = torch.randint(-3, 4, (1, 128, 1, 64), device=device).half()
    v = torch.randint(-3, 4, (1, 128, 1, 64), device=device).half()
    out = flash_attn_func(q, k, v)
    assert torch.equal(out, v.double().mean(1, keepdim=True).half().expand_as(out))


def test_merge_of_two_halves(device):
    """Attention over disjoint keys, merged, is attention over all of them; empty is neutral."""
    x = make_tensors(Case(seqlen_q=50, seqlen_k=200, dtype=torch.float16), device)
    halves = [
        flash_attn_func(x.q, x.k[:, part], x.v[:, part], return_lse=True)
        for part in (slice(0, 77), slice(77, 200))
    ]
    out, lse = flashattn_ext.merge(*halves[0], *halves[1])
    truth = harness.expected(x, {})
    error = (out.double() - truth["out"]).norm() / truth["out"].norm()
    assert error < 2 * compare.RELATIVE[torch.float16]
    compare.assert_lse(lse, truth)
    empty = torch.full_like(halves[0][0], 7.0), torch.full_like(halves[0][1], -math.inf)
    for merged in (
        flashattn_ext.merge(*halves[0], *empty),
        flashattn_ext.merge(*empty, *halves[0]),
    ):
        assert torch.equal(merged[0], halves[0][0])
        assert torch.equal(merged[1], halves[0][1])
    nothing = torch.zeros_like(empty[0]), empty[1]
    both = flashattn_ext.merge(*nothing, *nothing)
    assert not both[0].any()
    assert torch.equal(both[1], empty[1])
