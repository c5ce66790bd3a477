"""The plans of family sm90_fused without a GPU: where it runs, in which order, with what memory."""

import math
from dataclasses import replace

import pytest
import torch
from plans import HEAD_DIMS, ROOMY, ceil_div, explain_shape, first_unordered_length

from flashattn_ext.plan import DEVICES, explain

DELTA, FUSED, CONVERT, FILL = (
    "flash_bwd_delta_kernel",
    "flash_bwd_fused_sm90_kernel",
    "flash_bwd_dq_convert_sm90_kernel",
    "flash_fill_unowned_kernel",  # behind those of packed sequences
)
PACKED = ((5000, 4, 64), (6000, 2, 64), (6000, 2, 64), (9,), (9,))  # eight sequences
NAMED = "flashattn_ext: plan='sm90_fused' does not run this call: "
FUSED_DIMS = [dim for dim in HEAD_DIMS if dim <= 64 or 97 <= dim <= 128]
PLAIN = "it has no softcap and takes a softmax_scale above 0 alone"


def backward(**options):
    return explain_shape(backward=True, **options)


def names_of(plan):
    return [kernel.name for kernel in plan.kernels]


def in_order(plan):
    """Whether a plan of the family adds to dq in a fixed order; its kernels are named alike."""
    assert plan.family == "sm90_fused", plan
    assert [name for name in names_of(plan) if name != FILL] == [DELTA, FUSED, CONVERT]
    return plan.deterministic


def fused_kernel(plan):
    (kernel,) = (kernel for kernel in plan.kernels if kernel.name == FUSED)
    return kernel


# ---- where it runs ----


@pytest.mark.parametrize("dim_v", [8, 64, 72, 96, 104, 128, 136, 256])
def test_head_dims(dim_v):
    """The larger of the two is what counts."""
    for dim in HEAD_DIMS:
        sizes = {"dim": dim, "dim_v": dim_v}
        plan, named = backward(**sizes), backward(**sizes, plan="sm90_fused")
        larger = max(sizes.values())
        if larger in FUSED_DIMS:
            assert plan.family == named.family == "sm90_fused", sizes
            continue
        reason = "it is for head dims up to 64 and from 97 to 128, and these are {dim} and {dim_v}"
        reason = reason.format(**sizes)
        assert (plan.family, plan.rejected["sm90_fused"]) == ("sm90", reason)
        assert named.error == NAMED + reason


@pytest.mark.parametrize(
    "options",
    [{"softcap": 30.0}, {"softmax_scale": 0.0}, {"softmax_scale": -0.125}],
    ids=str,
)
def test_logits_that_are_not_plain(options):
    plan = backward(**options)
    assert (plan.family, plan.rejected["sm90_fused"]) == ("sm90", PLAIN)
    assert backward(**options, plan="sm90_fused").error == NAMED + PLAIN
    # Its forward is another matter.
    assert explain_shape(**options, plan="sm90_fused").family == "sm90_fused"


def test_options_it_has():
    for options in (
        {"softmax_scale": 1e-3},
        {"dtype": torch.float16},
        {"causal": True},
        {"causal": "top_left"},
        {"window_size": (20, 5)},
        {"heads_q": 12, "heads_k": 3},
        {"seqlen_k": 1},
    ):
        assert backward(**options).family == "sm90_fused", options


@pytest.mark.parametrize(("dim", "block_m"), [(64, 128), (128, 64)])
def test_sequences_much_shorter_than_a_block_are_left_to_others(dim, block_m):
    """Workspace grows with the tokens: at most four rows of sums for each row of q."""
    least = block_m // 4
    assert backward(seqlen_q=least, dim=dim).family == "sm90_fused"
    short = backward(seqlen_q=least - 1, dim=dim)
    assert (short.family, short.rejected["sm90_fused"]) == (
        "sm90",
        f"sequences are short: its buffer of dQ, in blocks of {block_m} rows, would have more than "
        "4 rows for each of q",
    )
    assert backward(seqlen_q=1, dim=dim, plan="sm90_fused").family == "sm90_fused"
    # Packed ones: what counts is the rows that there are.
    for sequences, family in ((8, "sm90_fused"), (5000, "sm90")):
        shapes = [(*shape[:2], dim) for shape in PACKED[:3]]
        lengths = [(sequences + 1,)] * 2
        plan = explain(*shapes, *lengths, 1500, 1500, device="h200", backward=True)
        assert plan.family == family


@pytest.mark.parametrize("device", DEVICES)
def test_devices(device):
    plan = backward(device=device)
    if DEVICES[device].compute_capability == (9, 0):
        assert plan.family == "sm90_fused"
    elif device == "cpu":
        assert plan.rejected["sm90_fused"].startswith("it runs on CUDA tensors and these are on")
    else:
        major, minor = DEVICES[device].compute_capability
        reason = f"it needs compute capability 9.0 and this device has {major}.{minor}"
        assert (plan.family, plan.rejected["sm90_fused"]) == ("sm80", reason)
        assert backward(device=device, plan="sm90_fused").error == NAMED + reason


@pytest.mark.parametrize("name", ROOMY)
def test_an_option_it_lacks_is_named(name):
    plan = backward(**{name: ROOMY[name]}, plan="sm90_fused")
    assert plan.error.startswith(f"{NAMED}{name} is not in the CUDA kernels")


def test_layouts_that_it_cannot_read():
    x = torch.empty(2, 300, 4, 64, dtype=torch.bfloat16)
    repeated = x[:, :, :1].expand(-1, -1, 4, -1)
    plan = explain(x, repeated, x, device="h200", backward=True)
    assert plan.family == "sm80"
    assert plan.rejected["sm90_fused"] == plan.rejected["sm90"]
    assert plan.rejected["sm90"].startswith("k repeats a dimension in place (stride 0)")
    far = torch.empty(2, 300, 4, 65, dtype=torch.bfloat16)[..., :64]
    plan = explain(x, far, x, device="h200", backward=True)
    assert (plan.family, plan.copies) == ("sm90_fused", ("k",))


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 9.0}], ids=str)
def test_its_forward_is_that_of_sm90(dim, options):
    for seqlen in (300, 5000):
        shape = {"seqlen_q": seqlen, "seqlen_k": seqlen, "dim": dim}
        plain = explain_shape(**shape, **options)
        named = explain_shape(**shape, **options, plan="sm90_fused")
        assert plain.family == "sm90"
        assert plain.rejected["sm90_fused"] == "its forward is that of sm90"
        assert named.family == "sm90_fused"
        assert named.rejected["sm90"] == "it runs this call and was not the one chosen"
        assert replace(named, family="sm90", rejected=plain.rejected) == plain


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_others_run_where_they_are_named(family):
    plan = backward(plan=family)
    assert plan.family == family
    assert plan.rejected["sm90_fused"] == "it runs this call and was not the one chosen"


# ---- in order or not ----


@pytest.mark.parametrize("dim", [64, 128])
def test_the_order_by_length(dim, switch):
    """What counts is how many keys a query sees at most."""
    switch(False)
    least = first_unordered_length(dim=dim)
    for same in (
        {"seqlen_q": 40},
        {"seqlen_q": 10**5},
        {"batch": 50, "heads_q": 64},
        {"dtype": torch.float16},
        {"dim": dim - 8, "dim_v": dim},
        {"causal": True},
        {"causal": True, "seqlen_q": 40},
        {"causal": "top_left"},
        {"window_size": (2**20, 2**20)},
        {"window_size": (-1, 100)},
        {"window_size": (100, -1)},
    ):
        for length, ordered in ((least - 1, True), (least, False)):
            shape = {"seqlen_q": length, "seqlen_k": length, "dim": dim} | same
            assert in_order(backward(**shape)) == ordered, (length, same)
    long = {"seqlen_q": 10**5, "seqlen_k": 10**5, "dim": dim}
    assert in_order(backward(**long, window_size=(least - 2, 0)))
    assert not in_order(backward(**long, window_size=(least - 1, 0)))


def test_the_order_of_packed_sequences_goes_by_the_longest(switch):
    switch(False)
    least = first_unordered_length()
    shapes = ((50000, 4, 64), (60000, 2, 64), (60000, 2, 64), (9,), (9,))
    for bound, ordered in ((least - 1, True), (least, False)):
        plan = explain(*shapes, 5000, bound, device="h200", backward=True)
        assert in_order(plan) == ordered
        assert names_of(plan) == [DELTA, FUSED, CONVERT, FILL]


LONG = {"seqlen_q": 10**5, "seqlen_k": 10**5}
SHORT = {"seqlen_q": 100, "seqlen_k": 100}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_the_order_is_what_determinism_asks_for(options, dim, switch):
    def orders(**more):
        """Of a long and a short problem, and of both with the family named."""
        return [
            in_order(backward(**shape, **options, **more, dim=dim, **plan))
            for plan in ({}, {"plan": "sm90_fused"})
            for shape in (LONG, SHORT)
        ]

    switch(False)
    assert orders() == [False, True, False, False]
    assert orders(deterministic=True) == [True] * 4
    switch(True, warn_only=True)  # a wish: a family that is named need not heed it
    assert orders() == [True, True, False, False]
    assert orders(deterministic=True) == [True] * 4
    switch(True)
    assert orders() == [True] * 4
    assert orders(deterministic=False) == [True] * 4


def test_other_families_do_not_depend_on_determinism(switch):
    for options in ({"dim": 256}, {"softcap": 9.0}, {"plan": "sm80"}, {"device": "a100"}):
        switch(False)
        plan = backward(**LONG, **options)
        assert plan.deterministic
        assert backward(**LONG, **options, deterministic=True) == plan
        switch(True)
        assert backward(**LONG, **options) == plan


@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_gives_the_same_bits_in_every_run(device, switch):
    switch(False)
    for plan in (None, "sm90_fused", "sm90", "sm80", "spec"):
        assert explain_shape(**LONG, device=device, plan=plan).deterministic


# ---- tiles, grids, memory ----


def ordered_plans(**options):
    """Of the same problem: the plan in order and the other one, whatever torch's switch."""
    plans = [backward(**options, plan="sm90_fused", deterministic=each) for each in (True, False)]
    assert [in_order(plan) for plan in plans] == [True, False]
    return plans


@pytest.mark.parametrize("dim", FUSED_DIMS)
def test_tiles_fit(dim):
    for plan in ordered_plans(dim=dim):
        kernel = fused_kernel(plan)
        assert (kernel.block_m, kernel.block_n) == (128 if dim <= 64 else 64, 128)
        assert kernel.num_warps == 12  # a producer, and two times 64 keys
        assert kernel.stages >= 2
        # K and V, every stage of Q and dO in chunks of 64 columns, and dS, all of two bytes.
        columns = 64 * ceil_div(dim, 64)
        rows = 2 * kernel.block_n + 2 * kernel.stages * kernel.block_m
        tiles = 2 * columns * rows + 2 * kernel.block_m * kernel.block_n
        assert tiles < kernel.smem_bytes <= DEVICES["h200"].smem_per_block_bytes


@pytest.mark.parametrize("dim", [64, 128])
def test_the_order_costs_a_few_barriers(dim):
    """Tiles, stages, grid and the rest of shared memory are the same in order and otherwise."""
    ordered, unordered = (fused_kernel(plan) for plan in ordered_plans(dim=dim))
    more_bytes = ordered.smem_bytes - unordered.smem_bytes
    assert 0 < more_bytes <= 64
    assert replace(unordered, smem_bytes=unordered.smem_bytes + more_bytes) == ordered


def test_tiles_by_the_wider_head_dim():
    for narrow, wide in ((8, 64), (40, 64), (104, 128), (120, 128)):
        for plans in zip(ordered_plans(dim=narrow), ordered_plans(dim=wide)):
            assert plans[0].kernels == plans[1].kernels
    for dim, dim_v in ((64, 128), (128, 64), (104, 8), (8, 104)):
        for plans in zip(ordered_plans(dim=dim, dim_v=dim_v), ordered_plans(dim=128)):
            assert plans[0].kernels == plans[1].kernels


@pytest.mark.parametrize("dim", [64, 128])
def test_grids(dim):
    """A CTA per block of keys of a KV head, or as many as run at once where those are fewer."""
    sizes = {"batch": 3, "seqlen_q": 1000, "seqlen_k": 2000, "heads_q": 6, "heads_k": 2}
    for plan in ordered_plans(**sizes, dim=dim):
        assert fused_kernel(plan).grid == 3 * 2 * ceil_div(2000, 128)
    assert 3 * 4 * ceil_div(2000, 128) > 132
    for plan in ordered_plans(**sizes | {"heads_q": 4, "heads_k": 4}, dim=dim):
        assert fused_kernel(plan).grid == 132
    for options in ({}, {"deterministic": True}):
        plan = explain(
            *PACKED, 1500, 1000, device="h200", backward=True, plan="sm90_fused", **options
        )
        assert fused_kernel(plan).grid == 8 * 2 * ceil_div(1000, 128)


def check_workspace(plan, blocks, sizes):
    """delta and lse_log2, the blocks of dq in fp32, and in order a counter for each; a few more."""
    kernel = fused_kernel(plan)
    sizes = {"ceil": math.ceil, "Br": kernel.block_m, **sizes}
    rows, bucket = sizes.get("total_q") or sizes["batch"] * sizes["seqlen_q"], sizes["bucket"]
    wanted = sizes["num_heads_q"] * (8 * rows + 4 * bucket * kernel.block_m * blocks)
    turns = 4 * sizes["num_heads_q"] * blocks if in_order(plan) else 0
    assert 0 <= plan.workspace_bytes - wanted - turns <= 32
    formula, _, rest = plan.workspace_formula.partition(", ")
    assert rest == "and counters"
    if plan.op == "varlen_bwd":
        formula = formula.replace("/", "//")
    assert eval(formula, {}, sizes) == wanted


@pytest.mark.parametrize("dim", [8, 64, 104, 128])
@pytest.mark.parametrize("seqlen_q", [1, 1000, 1024])
def test_dense_workspace(seqlen_q, dim):
    block_m, bucket = (128, 64) if dim <= 64 else (64, 128)
    sizes = {"batch": 3, "seqlen_q": seqlen_q}
    for plan in ordered_plans(**sizes, seqlen_k=2000, heads_q=6, heads_k=2, dim=dim):
        blocks = 3 * ceil_div(seqlen_q, block_m)
        check_workspace(plan, blocks, {"num_heads_q": 6, "bucket": bucket, **sizes})


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_packed_workspace(dim, deterministic):
    """A packed sequence may end in the middle of a block: there is one more for each."""
    block_m, bucket = (128, 64) if dim == 64 else (64, 128)
    shapes = [(*shape[:2], dim) for shape in PACKED[:3]]
    plan = explain(
        *shapes, *PACKED[3:], 1500, 1700, device="h200", backward=True, plan="sm90_fused",
        deterministic=deterministic,
    )  # fmt: skip
    sizes = {"num_heads_q": 4, "bucket": bucket, "total_q": 5000, "batch": 8}
    check_workspace(plan, 5000 // block_m + 8, sizes)


def test_summary():
    for plan in ordered_plans():
        stages = fused_kernel(plan).stages
        assert plan.summary == f"sm90_fused bwd 128x128 12 warps {stages} stages"
