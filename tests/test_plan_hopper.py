"""The plans of family sm90 without a GPU: tiles, grids, workspace, and what it cannot read.

Its backward where sm90_fused (test_plan_fused.py) is not chosen; named here.
"""

from dataclasses import replace

import pytest
import torch
from cases import heads_first
from plans import HEAD_DIMS, NATIVE, ROOMY, ceil_div, explain_shape, native_problem

from flashattn_ext.plan import DEVICES, explain, native_device


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_hopper_kernels_run_on_compute_capability_9_0_alone(device, backward):
    plan = explain_shape(device=device, backward=backward)
    hopper = "sm90_fused" if backward else "sm90"
    assert (plan.family == hopper) == (DEVICES[device].compute_capability == (9, 0))


def hopper_kernel(plan):
    assert plan.family == "sm90", plan
    (kernel,) = (kernel for kernel in plan.kernels if kernel.name == "flash_fwd_sm90_kernel")
    return kernel


def hopper_tile(seqlen_k=300, **options):
    """The tile of the Hopper forward: all of its kernel but the grid."""
    plan = explain_shape(**{"seqlen_q": seqlen_k, "seqlen_k": seqlen_k} | options)
    return replace(hopper_kernel(plan), grid=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [300, 3000, 30000])
@pytest.mark.parametrize("dim_v", [None, 8, 64, 128, 192, 256])
def test_hopper_tiles_fit(dim_v, seqlen, causal):
    for dim in HEAD_DIMS:
        kernel = hopper_tile(seqlen, dim=dim, dim_v=dim_v, causal=causal)
        assert kernel.block_m % 64 == 0  # 64 rows to a warpgroup of four warps, and one that loads
        assert kernel.num_warps == 4 * (kernel.block_m // 64 + 1)
        assert kernel.stages >= 2
        # Q, every stage of K and at least one of V, in chunks of 64 columns of two bytes.
        rows = kernel.block_m + kernel.stages * kernel.block_n
        chunks, chunks_v = ceil_div(dim, 64), ceil_div(dim if dim_v is None else dim_v, 64)
        tiles = 128 * (chunks * rows + chunks_v * kernel.block_n)
        assert tiles < kernel.smem_bytes <= DEVICES["h200"].smem_per_block_bytes


def test_hopper_tiles_by_head_dim():
    wide_keys, wide = hopper_tile(dim=192, dim_v=128), hopper_tile(dim=192)
    widest = hopper_tile(dim=256)
    assert wide.block_n < wide_keys.block_n  # a narrower V leaves room for more keys
    for dim in HEAD_DIMS:
        narrow_v = {hopper_tile(dim=dim, dim_v=dim_v) for dim_v in (72, 128)}
        narrow = hopper_tile(dim=128) if dim <= 128 else wide_keys
        assert narrow_v == {narrow if dim <= 192 else widest}
        # The wider of the two decides otherwise.
        assert hopper_tile(dim=dim, dim_v=136) == (wide if dim <= 192 else widest)
        assert hopper_tile(dim=dim, dim_v=256) == widest


def most_keys_of_the_first_tile(**options):
    """The longest problem of head dim 64 that runs in the tile of the shortest one."""
    low, high = 2, 2**20
    first = hopper_tile(low, **options)
    assert hopper_tile(high, **options) != first
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if hopper_tile(middle, **options) == first else (low, middle)
    return low


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_hopper_tiles_by_length(options):
    """At head dim 64 short problems have tiles of fewer rows: there are more of them to spread."""
    most = most_keys_of_the_first_tile(**options)
    short, long = hopper_tile(most, **options), hopper_tile(most + 1, **options)
    assert short.block_m < long.block_m
    lengths = {*range(2, 20000, 97), *(2**i for i in range(1, 30)), most - 1, most, most + 1}
    for length in lengths:
        assert hopper_tile(length, **options) == (short if length <= most else long), length


def test_hopper_tiles_by_mask():
    """Masks and windows leave less work at a length, and have a length of their own to change at.
    What they hide must be something; queries, heads and batches do not count."""
    most, most_masked = most_keys_of_the_first_tile(), most_keys_of_the_first_tile(causal=True)
    assert most < most_masked
    short, long = hopper_tile(most), hopper_tile(most + 1)
    for masked in (
        {"causal": True},
        {"causal": "top_left"},
        {"window_size": (100, -1)},
        {"window_size": (-1, 100)},
        {"window_size": (most_masked, 0)},
        {"causal": True, "seqlen_q": 2},
        {"causal": True, "batch": 50, "heads_q": 64},
    ):
        assert hopper_tile(most_masked, **masked) == short
        assert hopper_tile(most_masked + 1, **masked) == long
    for narrow in ((100, 100), (0, most_masked - 1)):  # what counts is how many keys a query sees
        assert hopper_tile(10**5, window_size=narrow) == short
    for full in (
        {"window_size": (most, most)},
        {"causal": True, "seqlen_q": 1},
        {"seqlen_q": 1},
        {"seqlen_q": 10**5},
        {"batch": 50, "heads_q": 64},
        {"softcap": 30.0},
    ):
        assert hopper_tile(most, **full) == short
        assert hopper_tile(most + 1, **full) == long


def test_hopper_tiles_of_packed_sequences_go_by_the_longest():
    most = most_keys_of_the_first_tile()
    shapes = ((50000, 4, 64), (60000, 2, 64), (60000, 2, 64), (9,), (9,))
    for bound in (most, most + 1):
        kernel = hopper_kernel(explain(*shapes, 5000, bound, device="h200"))
        assert replace(kernel, grid=0) == hopper_tile(bound)


def test_hopper_tiles_of_head_dim_128():
    """Short masked problems have narrower blocks of keys, of which more can be left out."""
    assert {hopper_tile(length, dim=128) for length in (2, 500, 5000)} == {hopper_tile(dim=128)}
    short, long = (hopper_tile(length, dim=128, causal=True) for length in (500, 5000))
    assert short.block_n < long.block_n == hopper_tile(dim=128).block_n
    assert short.block_m == long.block_m


@pytest.mark.parametrize("dim", [72, 96, 136, 192, 256])
def test_hopper_tiles_of_wider_heads_serve_every_length(dim):
    for causal in (False, True):
        for length in (2, 500, 5000, 10**6):
            assert hopper_tile(length, dim=dim, causal=causal) == hopper_tile(dim=dim)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("seqlen_k", [300, 5000])
def test_hopper_grids_are_what_runs_at_once(seqlen_k, dim):
    """A counter hands out the tiles that are left when every SM has as many CTAs as it holds.

    Not at every head dim where all tiles cost the same: there a CTA takes every grid-th.
    """
    device, tile = DEVICES["h200"], hopper_tile(seqlen_k, dim=dim)
    ctas_per_sm = device.smem_per_sm_bytes // (tile.smem_bytes + 1024)
    assert ctas_per_sm == (2 if dim == 64 and seqlen_k == 300 else 1)
    slots, block_m = device.num_sms * ctas_per_sm, tile.block_m

    def plan_of(seqlen_q, heads, **options):
        shape = {"batch": 1, "heads_q": heads, "heads_k": 1, "dim": dim}
        return explain_shape(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **shape, **options)

    for heads in (1, slots - 1, slots):
        plan = plan_of(block_m, heads)
        assert hopper_kernel(plan).grid == heads
        assert (plan.workspace_bytes, plan.workspace_formula) == (0, "")
    for seqlen_q in (block_m + 1, 100 * block_m):
        plan = plan_of(seqlen_q, slots)
        assert hopper_kernel(plan).grid == slots
        counter = (4, "one counter of tiles") if dim in (64, 192) else (0, "")
        assert (plan.workspace_bytes, plan.workspace_formula) == counter
        masked = plan_of(seqlen_q, slots, window_size=(seqlen_k - 2, seqlen_k))
        assert hopper_kernel(masked).grid >= device.num_sms
        assert (masked.workspace_bytes, masked.workspace_formula) == (4, "one counter of tiles")


def test_hopper_varlen_grids_come_from_the_upper_bounds():
    shapes = ((5000, 4, 64), (6000, 2, 64), (6000, 2, 64), (9,), (9,))
    short, long = (explain(*shapes, bound, 1700, device="h200") for bound in (100, 1500))
    names = [kernel.name for kernel in short.kernels]
    assert names == ["flash_fwd_sm90_kernel", "flash_fill_unowned_kernel"]
    assert long.kernels[-1].name == "flash_fill_unowned_kernel"
    assert (hopper_kernel(short).grid, short.workspace_bytes) == (8 * 4, 0)
    assert (hopper_kernel(long).grid, long.workspace_bytes) == (132, 4)


def hopper_reason(q, k=None, v=None, **options):
    k = q if k is None else k
    plan = explain(q, k, k if v is None else v, device="h200", **options)
    return plan.family, plan.rejected.get("sm90")


def test_hopper_kernels_read_no_repeated_dimension():
    """Tensor maps have no stride 0; a dimension of one element has no stride at all."""
    x = torch.empty(2, 300, 4, 64, dtype=torch.bfloat16)
    over_batch, over_rows, over_heads = (
        x[:1].expand(2, -1, -1, -1),
        x[:, :1].expand(-1, 300, -1, -1),
        x[:, :, :1].expand(-1, -1, 4, -1),
    )
    for name, inputs in (
        ("q", (over_batch, x, x)),
        ("k", (x, over_rows, x)),
        ("v", (x, x, over_heads)),
    ):
        assert hopper_reason(*inputs) == (
            "sm80",
            f"{name} repeats a dimension in place (stride 0), which tensor maps cannot; pass a "
            "contiguous copy to use it",
        )
    assert hopper_reason(x, x[:, :, :1], x[:, :, :1]) == ("sm90", None)
    one = torch.empty(300 * 64, dtype=torch.bfloat16).as_strided((1, 300, 1, 64), (0, 64, 0, 1))
    assert hopper_reason(one) == ("sm90", None)
    # A repeated input that is copied anyway is read from its copy.
    assert hopper_reason(x, x, x[:1, ..., :1].expand(2, -1, -1, 64)) == ("sm90", None)
    packed = torch.empty(300, 4, 64, dtype=torch.bfloat16)
    lengths = {"cu_seqlens_q": (3,), "cu_seqlens_k": (3,), "max_seqlen_q": 200, "max_seqlen_k": 200}
    assert hopper_reason(packed, **lengths) == ("sm90", None)
    assert hopper_reason(packed, packed[:, :1].expand(-1, 4, -1), **lengths)[0] == "sm80"


def test_hopper_kernels_read_views_in_place():
    x = torch.empty(2, 300, 4, 64, dtype=torch.bfloat16)
    fused = torch.empty(2, 300, 3, 4, 64, dtype=torch.bfloat16)
    for inputs in (
        (heads_first(x),) * 3,
        fused.unbind(2),
        (x[..., :56],) * 3,
        (x[:, ::2],) * 3,
    ):
        plan = explain(*inputs, device="h200")
        assert (plan.family, plan.copies) == ("sm90", ())


def test_hopper_kernels_refuse_what_a_tensor_map_cannot_hold():
    def layout(batch_stride):
        layout, strides = NATIVE.Layout(), NATIVE.Strides()
        strides.batch, strides.row, strides.head = batch_stride, 64, 64
        layout.strides = strides
        return layout

    def reasons(**batch_strides):
        problem = native_problem(seqlen_q=128, seqlen_k=128, batch=2)
        for name, batch_stride in batch_strides.items():
            setattr(problem, name, layout(batch_stride))
        explanation = NATIVE.explain(problem, native_device(DEVICES["h200"]))
        return explanation.family, {each.family: each.reason for each in explanation.rejected}

    fits = dict.fromkeys("qkv", 2**39 - 8)
    assert reasons(**fits)[0] == "sm90"
    family, rejected = reasons(**fits | {"k": 2**39})
    assert family == "sm80"
    assert rejected["sm90"] == ("a stride of k, 549755813888 elements, is larger than 549755813887")


@pytest.mark.parametrize("name", ROOMY)
def test_hopper_kernels_name_the_option_they_lack(name):
    plan = explain_shape(**{name: ROOMY[name]}, plan="sm90")
    assert plan.error.startswith(
        f"flashattn_ext: plan='sm90' does not run this call: {name} is not in the CUDA kernels"
    )


def backward_kernels(**options):
    plan = explain_shape(backward=True, plan="sm90", **options)
    assert plan.family == "sm90", plan
    delta, dq, dkv = plan.kernels
    assert [delta.name, dq.name, dkv.name] == [
        "flash_bwd_delta_kernel",
        "flash_bwd_dq_sm90_kernel",
        "flash_bwd_dkv_sm90_kernel",
    ]
    return plan, dq, dkv


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_hopper_backward_tiles_fit(dim):
    """In chunks of 64 columns of two bytes: Q and dO beside stages of K and V, and the reverse."""
    _, dq, dkv = backward_kernels(dim=dim)
    chunk_bytes = 128 * ceil_div(dim, 64)
    most = DEVICES["h200"].smem_per_block_bytes
    assert 2 * chunk_bytes * (dq.block_m + dq.block_n) < dq.smem_bytes <= most
    rows = dkv.block_n + dkv.stages * dkv.block_m
    assert 2 * chunk_bytes * rows < dkv.smem_bytes <= most
    for kernel in (dq, dkv):
        assert kernel.num_warps % 4 == 0  # warpgroups
        assert kernel.block_m % 64 == 0
        assert kernel.block_n % 64 == 0


def test_hopper_backward_tiles_by_the_wider_head_dim():
    for dim, dim_v in ((64, 128), (128, 64), (200, 8), (8, 200)):
        assert (
            backward_kernels(dim=dim, dim_v=dim_v)[1:] == backward_kernels(dim=max(dim, dim_v))[1:]
        )


def test_hopper_backward_grids():
    """A CTA per block of queries of a query head, and per block of keys of a KV head."""
    sizes = {"batch": 3, "seqlen_q": 1000, "seqlen_k": 2000, "heads_q": 6, "heads_k": 2}
    plan, dq, dkv = backward_kernels(**sizes, dim=128)
    assert dq.grid == 3 * 6 * ceil_div(1000, dq.block_m)
    assert dkv.grid == 3 * 2 * ceil_div(2000, dkv.block_n)
    assert plan.workspace_bytes == 8 * 6 * 3 * 1000


def test_the_backward_of_a_forced_forward_is_its_family_s():
    for family in ("sm90_fused", "sm90", "sm80"):
        assert explain_shape(plan=family, backward=True).family == family
