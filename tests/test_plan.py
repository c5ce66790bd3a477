"""csrc/plan without a GPU: support rules, tiles, grids, memory, and the reasons it gives."""

import pytest
import torch
from cases import heads_first
from plans import HEAD_DIMS, NATIVE, ROOMY, ceil_div, explain_shape, native_problem

from flashattn_ext.plan import CPU, DEVICES, DeviceFacts, explain, native_device

# One GPU of each class of shared memory: 99, 163 and 227 KB per block.
SMEM_CLASSES = ["rtx4090", "a100", "h200"]
CUDA_FAMILIES = ["sm90_fused", "sm90", "sm80"]


def tiled(plan):
    """The plan's kernels that have tiles, by what they compute."""
    return {kernel.name.split("_")[-3]: kernel for kernel in plan.kernels if kernel.grid}


# ---- tiles, grids, memory ----


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("device", SMEM_CLASSES)
def test_every_head_dim_has_tiles_that_fit(device, backward):
    limit = DEVICES[device].smem_per_block_bytes
    for dim in HEAD_DIMS:
        plan = explain_shape(dim=dim, device=device, backward=backward, plan="sm80")
        assert plan.family == "sm80", plan
        assert plan.error is None
        assert tiled(plan).keys() == ({"dq", "dkv"} if backward else {"fwd"})
        for kernel in tiled(plan).values():
            # At least Q, K and V tiles (and dO in the backward) of two bytes an element.
            rows = (1 + backward) * kernel.block_m + 2 * kernel.block_n
            assert 2 * dim * rows <= kernel.smem_bytes <= limit


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_more_shared_memory_is_never_used_less(dim, backward):
    """What the CTAs of one SM take together; a tile may be smaller where two of them fit."""

    def bytes_per_sm(device):
        facts = DEVICES[device]
        plan = explain_shape(dim=dim, device=device, backward=backward, plan="sm80")
        reserved = 1024  # CUDA keeps this much of every CTA's
        return {
            name: facts.smem_per_sm_bytes // (kernel.smem_bytes + reserved) * kernel.smem_bytes
            for name, kernel in tiled(plan).items()
        }

    small, middle, large = map(bytes_per_sm, SMEM_CLASSES)
    for name in small:
        assert 0 < small[name] <= middle[name] <= large[name]


@pytest.mark.parametrize("family", CUDA_FAMILIES)
def test_head_dims_of_k_and_v_share_the_bucket_of_the_larger(family):
    square = explain_shape(dim=128, plan=family)
    assert explain_shape(dim=64, dim_v=128, plan=family).kernels == square.kernels
    assert explain_shape(dim=128, dim_v=8, plan=family).kernels == square.kernels
    assert explain_shape(dim=104, plan=family).kernels == square.kernels
    assert explain_shape(dim=64, plan=family).kernels != square.kernels
    # The others store 96 columns as two chunks of 64: nothing that explain could tell.
    if family == "sm80":
        assert explain_shape(dim=96, plan=family).kernels != square.kernels


def test_grids_are_one_dimensional_counts_of_blocks():
    shape = {"batch": 3, "seqlen_q": 1000, "seqlen_k": 777, "heads_q": 6, "heads_k": 2, "dim": 128}
    forward = tiled(explain_shape(**shape, plan="sm80"))["fwd"]
    assert forward.grid == ceil_div(1000, forward.block_m) * 3 * 6
    backward = tiled(explain_shape(**shape, backward=True, plan="sm80"))
    assert backward["dq"].grid == ceil_div(1000, backward["dq"].block_m) * 3 * 6
    assert backward["dkv"].grid == ceil_div(777, backward["dkv"].block_n) * 3 * 2


def test_varlen_grids_come_from_the_upper_bounds():
    plan = explain((5000, 4, 64), (6000, 2, 64), (6000, 2, 64), (9,), (9,), 1500, 1700)
    cuda = explain(
        (5000, 4, 64), (6000, 2, 64), (6000, 2, 64), (9,), (9,), 1500, 1700, device="a100"
    )
    assert plan.op == cuda.op == "varlen_fwd"
    forward = tiled(cuda)["fwd"]
    assert forward.grid == ceil_div(1500, forward.block_m) * 8 * 4
    assert cuda.kernels[-1].name == "flash_fill_unowned_kernel"


def test_large_batches_and_heads_need_no_second_grid_dimension():
    for family in CUDA_FAMILIES:
        many_batches = explain_shape(batch=65536, heads_q=8, heads_k=8, plan=family)
        many_heads = explain_shape(batch=1, heads_q=2**17, heads_k=2**17, plan=family)
        assert many_batches.family == many_heads.family == family


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_workspace_is_two_numbers_a_row(family):
    assert explain_shape(plan=family).workspace_bytes == 0
    dense = explain_shape(batch=3, seqlen_q=1000, heads_q=6, heads_k=2, backward=True, plan=family)
    assert dense.workspace_bytes == 8 * 6 * 3 * 1000
    sizes = {"num_heads_q": 6, "batch": 3, "seqlen_q": 1000}
    assert eval(dense.workspace_formula, {}, sizes) == dense.workspace_bytes
    varlen = explain(
        (5000, 4, 64), (6000, 2, 64), (6000, 2, 64), (9,), (9,), 1500, 1700,
        device="h200", backward=True, plan=family,
    )  # fmt: skip
    assert varlen.workspace_bytes == 8 * 4 * 5000
    sizes = {"num_heads_q": 4, "total_q": 5000}
    assert eval(varlen.workspace_formula, {}, sizes) == varlen.workspace_bytes


@pytest.mark.parametrize("zero", ["batch", "seqlen_q", "seqlen_k"])
def test_nothing_to_compute_launches_nothing(zero):
    for backward in (False, True):
        plan = explain_shape(**{zero: 0}, backward=backward)
        assert plan.family == ("sm90_fused" if backward else "sm90")
        assert plan.empty
        assert plan.kernels == ()


# ---- support rules ----


@pytest.mark.parametrize("dim", [1, 4, 12, 20, 100, 255])
def test_head_dims_that_are_not_multiples_of_8(dim):
    pad = ceil_div(dim, 8) * 8
    plan = explain_shape(dim=dim, dim_v=64)
    assert plan.family is None
    assert plan.error == (
        f"flashattn_ext: no kernel runs this call. sm90_fused, sm90, sm80: head dim {dim} of q and "
        f"k is not a multiple of 8; pad q and k with zeros to {pad} and pass "
        f"softmax_scale=1/sqrt({dim})"
    )
    assert plan.rejected["sm80"] in plan.error
    assert (
        f"head dim {dim} of v is not a multiple of 8; pad v with zeros to {pad} and take the first "
        f"{dim} columns of the output"
    ) in explain_shape(dim=64, dim_v=dim).error


def test_head_dims_above_256():
    assert "head dim 264 of q and k is larger than 256" in explain_shape(dim=264, dim_v=64).error
    assert "head dim 264 of v is larger than 256" in explain_shape(dim=64, dim_v=264).error


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_dtypes(name):
    plan = explain_shape(dtype=getattr(torch, name))
    assert plan.error == (
        "flashattn_ext: no kernel runs this call. sm90_fused, sm90, sm80: it takes float16 and "
        f"bfloat16 and q is {name}; cast q, k and v, or call under torch.autocast('cuda')"
    )
    assert explain_shape(dtype=torch.float16).family == "sm90"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ROOMY)
def test_an_option_without_cuda_kernel_is_named(name, backward):
    plan = explain_shape(**{name: ROOMY[name]}, backward=backward)
    assert plan.family is None
    assert f"sm80: {name} is not in the CUDA kernels; it works on CPU tensors" in plan.error
    assert plan.error.endswith(f"move the call there or leave {name} out")
    assert explain_shape(**{name: ROOMY[name]}, device="cpu").family == "spec"


def test_key_bias_is_named():
    varlen = ((50, 4, 64), (60, 2, 64), (60, 2, 64), (3,), (3,), 30, 40)
    plan = explain(*varlen, key_bias=torch.zeros(60), device="h200")
    assert "sm80: key_bias is not in the CUDA kernels" in plan.error
    assert explain(*varlen, seqused_k=torch.ones(2, dtype=torch.int32), device="h200").error is None


def test_devices():
    turing = DeviceFacts("t4", (7, 5), 40, 64 * 1024, 64 * 1024)
    assert explain_shape(device=turing).error.endswith(
        ". sm90_fused, sm90: it needs compute capability 9.0 and this device has 7.5. "
        "sm80: it needs compute capability 8.0 or newer and this device has 7.5"
    )
    tiny = DeviceFacts("tiny", (8, 7), 16, 64 * 1024, 64 * 1024)
    assert explain_shape(device=tiny).error.endswith(
        "sm80: it needs 101376 bytes of shared memory per block and this device offers 65536"
    )
    later = DeviceFacts("later", (13, 0), 200, 300 * 1024, 301 * 1024)
    assert explain_shape(device=later).family == "sm80"


# ---- limits ----


def native_error(**sizes):
    return NATIVE.explain(native_problem(**sizes), native_device(DEVICES["h200"])).error


def test_length_limits():
    longest = 2**30 - 1
    assert native_error(seqlen_q=longest, seqlen_k=longest) == ""
    assert "query length 1073741824 is larger than 1073741823" in native_error(
        seqlen_q=2**30, seqlen_k=1
    )
    assert "key length 1073741824 is larger than 1073741823" in native_error(
        seqlen_q=1, seqlen_k=2**30
    )


def test_grid_limits():
    assert native_error(seqlen_q=1, seqlen_k=1, batch=2**31 - 1) == ""
    assert "batch 2147483648 is larger than 2147483647" in native_error(
        seqlen_q=1, seqlen_k=1, batch=2**31
    )
    assert "head count 65536 is larger than 32767" in native_error(
        seqlen_q=1, seqlen_k=1, batch=65537, num_heads_q=65536
    )
    assert "is larger than 2147483647; split the batch" in native_error(
        seqlen_q=2**20, seqlen_k=1, batch=2**20, num_heads_q=16
    )
    for op in (NATIVE.Op.forward, NATIVE.Op.backward):  # a product past int64 must not wrap
        error = native_error(
            op=op, seqlen_q=2**30 - 1, seqlen_k=2**30 - 1, batch=2**20, num_heads_q=2**10
        )
        assert "split the batch" in error


# ---- layouts ----


def copies(q, k=None, v=None):
    k = q if k is None else k
    return explain(q, k, k if v is None else v, device="h200").copies


def test_layouts_that_run_in_place():
    x = torch.empty(2, 300, 4, 64, dtype=torch.bfloat16)
    assert copies(x) == ()
    assert copies(heads_first(x)) == ()
    fused = torch.empty(2, 300, 3, 4, 64, dtype=torch.bfloat16)
    assert copies(*fused.unbind(2)) == ()
    assert copies(x[:1].expand(2, -1, -1, -1)) == ()
    assert copies(x[:, :, :1].expand(-1, -1, 4, -1)) == ()
    assert copies(x[:, :, :, :56]) == ()
    # Strides of dimensions of size 1 say nothing.
    one_head = torch.empty(300 * 64, dtype=torch.bfloat16)
    assert copies(one_head.as_strided((1, 300, 1, 64), (3, 64, 5, 1))) == ()


def test_layouts_that_are_copied():
    x = torch.empty(2, 300, 4, 64, dtype=torch.bfloat16)
    wide = torch.empty(2, 300, 4, 65, dtype=torch.bfloat16)
    assert copies(x.transpose(2, 3).contiguous().transpose(2, 3), x, x) == ("q",)
    assert copies(x, wide[..., :64], x) == ("k",)  # rows 130 bytes apart
    assert copies(x, x, torch.empty(2 * 300 * 4 * 64 + 1, dtype=x.dtype)[1:].view(x.shape)) == (
        "v",
    )  # starts 2 bytes past a 16-byte boundary


# ---- windows ----


def window(seqlen_q, seqlen_k, **options):
    return explain_shape(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **options).window


def test_equivalent_windows_become_one():
    assert window(64, 64, causal=True) == (-1, 0)
    assert window(64, 64, window_size=(-1, 0)) == (-1, 0)
    assert window(64, 64, window_size=(63, 0)) == (-1, 0)
    assert window(64, 64, window_size=(62, 0)) == (62, 0)
    assert window(64, 64, window_size=(5, 63)) == (5, -1)
    assert window(64, 64, window_size=(5, 9), causal=True) == (5, 0)
    assert window(64, 64, window_size=(1000, 1000)) == (-1, -1)
    assert window(64, 64, window_size=(2**40, 2**40)) == (-1, -1)


def test_windows_of_unequal_lengths():
    # Bottom-right: r runs from -(Sk - 1) to Sq - 1. Top-left: from -(Sq - 1) to Sk - 1.
    assert window(2, 50, window_size=(49, 1)) == (-1, -1)
    assert window(2, 50, window_size=(48, 0)) == (48, 0)
    assert window(1, 50, causal=True) == (-1, -1)  # the last query sees every key
    assert window(1, 50, causal="top_left") == (-1, 0)  # the first sees one
    assert window(2, 50, causal="top_left", window_size=(1, -1)) == (-1, 0)


# ---- families ----


def test_families_and_their_reasons():
    assert [name for name, _ in NATIVE.FAMILIES] == [*CUDA_FAMILIES, "spec"]
    hopper, ampere, on_cpu = (explain_shape(device=name) for name in ("h200", "a100", "cpu"))
    assert (hopper.family, ampere.family, on_cpu.family) == ("sm90", "sm80", "spec")
    on_cuda, on_the_cpu = "these are on a CUDA device", "these are on the CPU"
    assert hopper.rejected == {
        "sm90_fused": "its forward is that of sm90",
        "sm80": "it runs this call and was not the one chosen",
        "spec": f"it runs on CPU tensors and {on_cuda}",
    }
    assert ampere.rejected == {
        "sm90_fused": "it needs compute capability 9.0 and this device has 8.0",
        "sm90": "it needs compute capability 9.0 and this device has 8.0",
        "spec": f"it runs on CPU tensors and {on_cuda}",
    }
    assert on_cpu.rejected == dict.fromkeys(
        CUDA_FAMILIES, f"it runs on CUDA tensors and {on_the_cpu}"
    )


def test_a_forced_family_runs_or_says_why_not():
    assert explain_shape(plan="sm90") == explain_shape()
    assert explain_shape(plan="sm80").family == "sm80"
    assert explain_shape(plan="sm80", device="a100") == explain_shape(device="a100")
    assert explain_shape(plan="spec", device="cpu").family == "spec"
    assert explain_shape(plan="sm90", device="a100").error == (
        "flashattn_ext: plan='sm90' does not run this call: it needs compute capability 9.0 and "
        "this device has 8.0"
    )
    assert explain_shape(plan="sm80", device=CPU).error == (
        "flashattn_ext: plan='sm80' does not run this call: it runs on CUDA tensors and these are "
        "on the CPU"
    )
    assert explain_shape(plan="spec").error == (
        "flashattn_ext: plan='spec' does not run this call: it runs on CPU tensors and these are "
        "on a CUDA device"
    )
    assert explain_shape(plan="sm80", dim=12).error.startswith(
        "flashattn_ext: plan='sm80' does not run this call: head dim 12 of q and k"
    )
    assert explain_shape(plan="sm75").error == (
        "flashattn_ext: plan='sm75' names no kernel family; there are sm90_fused, sm90, sm80, spec"
    )
