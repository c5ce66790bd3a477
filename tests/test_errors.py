"""Every host check raises its sentence: the tensor, what was wanted, what came, what to do.

The checks are the same code for every device; here they run on the CPU and on "meta" tensors (what
compilers see), through ops and functions, with and without autograd. What only a device's kernels
refuse is in test_plan.py; that nothing else happens on a GPU is at the end.
"""

import math
import re

import pytest
import torch

import flashattn_ext
from flashattn_ext import (
    _no_cuda,
    build_info,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)

B, SQ, SK, HQ, HK, D, DV = 2, 20, 30, 4, 2, 16, 24
ops = torch.ops.flashattn_ext


def tensors(device="cpu", dtype=torch.float32):
    """q, k, v of a dense call."""
    shapes = ((B, SQ, HQ, D), (B, SK, HK, D), (B, SK, HK, DV))
    return [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]


def varlen_tensors(device="cpu"):
    """The positional arguments of a varlen call: two sequences of 10 queries and 15 keys."""
    q, k, v = (x.flatten(0, 1)[: x.shape[0] * x.shape[1] // 2] for x in tensors(device))
    cu_seqlens_q = torch.tensor([0, 10, 20], dtype=torch.int32, device=device)
    cu_seqlens_k = torch.tensor([0, 15, 30], dtype=torch.int32, device=device)
    return [q, k, v, cu_seqlens_q, cu_seqlens_k, 10, 15]


def raises(sentence, error=RuntimeError):
    """Expects `error` with the sentence, which stands for itself and not for a pattern."""
    return pytest.raises(error, match=re.escape(sentence))


@pytest.fixture(params=["cpu", "meta"])
def device(request):
    return request.param


def test_the_calls_below_are_right_but_for_one_thing(device):
    out = flash_attn_func(*tensors(device))
    assert out.shape == (B, SQ, HQ, DV)
    out = flash_attn_varlen_func(*varlen_tensors(device))
    assert out.shape == (SQ, HQ, DV)


# ---- device ----

OPTIONS_ELSEWHERE = {
    "bias": torch.zeros(1, device="meta"),
    "mask": torch.ones(1, dtype=torch.bool, device="meta"),
    "alibi_slopes": torch.zeros(HQ, device="meta"),
    "rel_bias": torch.zeros(HQ, 3, device="meta"),
    "sink": torch.zeros(HQ, device="meta"),
    "block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta"),
    "rng_state": torch.zeros(2, dtype=torch.uint64, device="meta"),
}


@pytest.mark.parametrize("name", ["k", "v"])
def test_inputs_on_two_devices(name):
    q, k, v = tensors()
    with raises(
        f"flashattn_ext: {name} must be on the device of q (cpu), got meta; move it with "
        f"{name}.to(q.device)"
    ):
        flash_attn_func(q, **{"k": k, "v": v, name: {"k": k, "v": v}[name].to("meta")})


@pytest.mark.parametrize("name", OPTIONS_ELSEWHERE)
def test_options_on_another_device(name):
    with raises(f"flashattn_ext: {name} must be on the device of q (cpu), got meta"):
        flash_attn_func(*tensors(), **{name: OPTIONS_ELSEWHERE[name]})


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_cu_seqlens_on_another_device(name):
    arguments = varlen_tensors()
    index = ["cu_seqlens_q", "cu_seqlens_k"].index(name) + 3
    arguments[index] = arguments[index].to("meta")
    with raises(f"flashattn_ext: {name} must be on the device of q (cpu), got meta"):
        flash_attn_varlen_func(*arguments)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k", "key_bias"])
def test_varlen_options_on_another_device(name):
    option = {name: torch.zeros(2, dtype=torch.int32, device="meta")}
    with raises(f"flashattn_ext: {name} must be on the device of q (cpu), got meta"):
        flash_attn_varlen_func(*varlen_tensors(), **option)


# ---- dtype ----


def test_dtype_of_q(device):
    with raises("q must be float16, bfloat16, float32 or float64, got int32"):
        flash_attn_func(*tensors(device, torch.int32))


@pytest.mark.parametrize("index", [1, 2])
def test_dtypes_that_differ(device, index):
    inputs = tensors(device, torch.bfloat16)
    inputs[index] = inputs[index].half()
    name = "qkv"[index]
    with raises(
        f"{name} must be bfloat16 like q, got float16; cast it with {name}.to(torch.bfloat16)"
    ):
        flash_attn_func(*inputs)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("bias", (1, 1, 1, SK), "float16 like q, or float32"),
        ("rel_bias", (HQ, 3), "float16 like q, or float32"),
        ("alibi_slopes", (HQ,), "float32"),
        ("sink", (HQ,), "float32"),
        ("mask", (1, 1, 1, SK), "bool"),
        ("block_mask", (1, 1, 1, 1), "bool"),
        ("rng_state", (2,), "uint64"),
    ],
)
def test_dtypes_of_options(device, name, shape, wanted):
    option = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device)}
    with raises(f"{name} must be {wanted}, got bfloat16; cast it with {name}.to(torch."):
        flash_attn_func(*tensors(device, torch.float16), **option)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
def test_lengths_that_are_not_int32(device, name):
    arguments = varlen_tensors(device)
    options = {}
    if name.startswith("cu"):
        index = ["cu_seqlens_q", "cu_seqlens_k"].index(name) + 3
        arguments[index] = arguments[index].long()
    else:
        options[name] = torch.zeros(2, dtype=torch.int64, device=device)
    with raises(f"{name} must be int32, got int64; cast it with {name}.to(torch.int32)"):
        flash_attn_varlen_func(*arguments, **options)


# ---- layout ----


@pytest.mark.parametrize("index", [0, 1, 2])
def test_ranks(device, index):
    inputs = tensors(device)
    inputs[index] = inputs[index][0]
    with raises(
        f"{'qkv'[index]} must be (batch, seqlen, heads, head_dim), got 3 dimensions: "
        f"{list(inputs[index].shape)}"
    ):
        flash_attn_func(*inputs)
    arguments = varlen_tensors(device)
    arguments[index] = arguments[index][None]
    with raises(f"{'qkv'[index]} must be (tokens, heads, head_dim), got 4 dimensions"):
        flash_attn_varlen_func(*arguments)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested")
def test_tensors_that_are_not_strided():
    q, k, v = tensors()
    mask = torch.ones(SQ, SK, dtype=torch.bool)
    with raises(
        "mask must be a strided tensor, got the layout Sparse; make it dense with mask.to_dense()"
    ):
        flash_attn_func(q, k, v, mask=mask.to_sparse())
    with raises("k must be a strided tensor, got the layout SparseCsr"):
        flash_attn_func(q, k.flatten(1).to_sparse_csr(), v)
    with raises("q is a nested tensor; pass its values to the varlen function instead"):
        flash_attn_func(torch.nested.nested_tensor([q[0], q[1]]), k, v)


# ---- shape ----


def test_shapes_that_do_not_go_together(device):
    q, k, v = tensors(device)
    with raises("k must have the batch size of q (2), got 1"):
        flash_attn_func(q, k[:1], v)
    with raises("v must have the batch size of q (2), got 1"):
        flash_attn_func(q, k, v[:1])
    with raises("v must have the length of k (30), got 29"):
        flash_attn_func(q, k, v[:, :29])
    with raises("v must have the heads of k (2), got 1"):
        flash_attn_func(q, k, v[:, :, :1])
    with raises("k must have the head dim of q (16), got 8"):
        flash_attn_func(q, k[..., :8], v)
    with raises("k and v have no heads; they need at least 1"):
        flash_attn_func(q, k[:, :, :0], v[:, :, :0])
    with raises("head dims must be at least 1, got 0 for q and k and 24 for v"):
        flash_attn_func(q[..., :0], k[..., :0], v)


def test_heads_that_do_not_divide(device):
    q, k, v = tensors(device)
    with raises(
        "the heads of q must be a multiple of the heads of k and v, got 3 and 2; the layout is "
        "(batch, seqlen, heads, head_dim), not (batch, heads, ...)"
    ):
        flash_attn_func(q[:, :, :3], k, v)


def test_varlen_shapes(device):
    q, k, v, cu_seqlens_q, cu_seqlens_k, *bounds = varlen_tensors(device)
    with raises("v must have the tokens of k (30), got 29"):
        flash_attn_varlen_func(q, k, v[:29], cu_seqlens_q, cu_seqlens_k, *bounds)
    with raises("cu_seqlens_k must have as many entries as cu_seqlens_q (batch + 1 = 3), got 2"):
        flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k[:2], *bounds)
    with raises("cu_seqlens_q must have one dimension of batch + 1 entries, got the shape [1, 3]"):
        flash_attn_varlen_func(q, k, v, cu_seqlens_q[None], cu_seqlens_k, *bounds)
    with raises("cu_seqlens_k must hold batch + 1 entries and is empty"):
        flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k[:0], *bounds)
    for name in ("seqused_q", "seqused_k"):
        seqused = torch.ones(3, dtype=torch.int32, device=device)
        with raises(f"{name} must have the shape (batch) = [2], got [3]"):
            flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *bounds, **{name: seqused})
    with raises("key_bias must have the shape (total_k) or (heads_q, total_k) = [4, 30], got [20]"):
        flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *bounds, key_bias=torch.zeros(20, device=device)
        )


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        (
            "bias",
            (1, 1, SK, SQ),
            "bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = [2, 4, 20, 30], "
            "got [1, 1, 30, 20]",
        ),
        ("bias", (1, B, HQ, SQ, SK), "bias must broadcast to"),
        ("mask", (3, 1, 1, SK), "mask must broadcast to"),
        ("alibi_slopes", (HK,), "alibi_slopes must have the shape (heads_q) or (batch, heads_q)"),
        ("alibi_slopes", (1, HQ), "= [2, 4], got [1, 4]"),
        ("rel_bias", (HQ, 4), "rel_bias must have the shape (heads_q, 2 R + 1) with heads_q = 4"),
        ("rel_bias", (HK, 3), "got [2, 3]"),
        ("sink", (HK,), "sink must have the shape (heads_q) = [4], got [2]"),
        (
            "block_mask",
            (1, 1, 1, 2),
            "block_mask must have the shape (batch or 1, heads_q or 1, tiles of 128 queries, tiles "
            "of 128 keys) = [2, 4, 1, 1], got [1, 1, 1, 2]",
        ),
        ("block_mask", (1, 1), "block_mask must have the shape"),
        ("block_mask", (1, 3, 1, 1), "block_mask must have the shape"),
        ("rng_state", (3,), "rng_state must have the shape (seed, offset) = [2], got [3]"),
    ],
)
def test_shapes_of_options(device, name, shape, sentence):
    dtypes = {"mask": torch.bool, "block_mask": torch.bool, "rng_state": torch.uint64}
    option = {name: torch.zeros(shape, dtype=dtypes.get(name), device=device)}
    with raises(sentence):
        flash_attn_func(*tensors(device), **option)


# ---- value ----


def test_windows(device):
    with raises("window_right must be -1 (unlimited) or a number of keys from 0, got -3"):
        flash_attn_func(*tensors(device), window_size=(-1, -3))
    with raises("window_left must be -1 (unlimited) or a number of keys from 0, got -2"):
        flash_attn_varlen_func(*varlen_tensors(device), window_size=(-2, 0))


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"softcap": -1.0}, "softcap must be 0 (off) or a positive number, got -1"),
        ({"softcap": math.inf}, "softcap must be 0 (off) or a positive number, got inf"),
        ({"dropout_p": 1.0}, "dropout_p must be at least 0 and below 1, got 1"),
        ({"dropout_p": -0.1}, "dropout_p must be at least 0 and below 1, got -0.1"),
        ({"softmax_scale": math.nan}, "softmax_scale must be finite, got nan"),
        (
            {"plan": "sm75"},
            "plan='sm75' names no kernel family; there are sm90_fused, sm90, sm80, spec",
        ),
    ],
)
def test_values(device, option, sentence):
    with raises(f"flashattn_ext: {sentence}"):
        flash_attn_func(*tensors(device), **option)


def test_a_plan_for_another_device():
    for family in ("sm90_fused", "sm90", "sm80"):
        with raises(f"plan='{family}' runs on CUDA tensors and q is on the CPU; leave plan out or"):
            flash_attn_func(*tensors(), plan=family)
    assert flash_attn_func(*tensors(), plan="spec").shape == (B, SQ, HQ, DV)


def test_negative_max_seqlen(device):
    *inputs, _, max_seqlen_k = varlen_tensors(device)
    with raises("max_seqlen_q must not be negative, got -1"):
        flash_attn_varlen_func(*inputs, -1, max_seqlen_k)
    with raises("max_seqlen_k must not be negative, got -1"):
        flash_attn_varlen_func(*inputs, 10, -1)


def test_causal_is_one_of_four():
    with raises(
        "flashattn_ext: causal must be False, True, 'bottom_right' (the same as True) or "
        "'top_left', got 'upper'",
        ValueError,
    ):
        flash_attn_func(*tensors(), causal="upper")


def test_max_seqlen_may_be_a_tensor_the_host_can_read():
    *inputs, max_seqlen_q, max_seqlen_k = varlen_tensors()
    expected = flash_attn_varlen_func(*inputs, max_seqlen_q, max_seqlen_k)
    bounds = (torch.tensor(max_seqlen_q, dtype=torch.int32), torch.tensor(max_seqlen_k))
    torch.testing.assert_close(flash_attn_varlen_func(*inputs, *bounds), expected, rtol=0, atol=0)
    with raises(
        "flashattn_ext: max_seqlen_k is a tensor on meta, and reading it would wait for the "
        "device; pass an int (an upper bound is enough) or a CPU tensor",
        ValueError,
    ):
        flash_attn_varlen_func(*inputs, max_seqlen_q, bounds[1].to("meta"))


def test_packed_layouts():
    with raises(
        "flashattn_ext: qkv must be (batch, seqlen, 3, heads, head_dim), got the shape (2, 20, 2, "
        "4, 16)",
        ValueError,
    ):
        flash_attn_qkvpacked_func(torch.zeros(2, 20, 2, 4, 16))
    with raises("kv must be (batch, seqlen_k, 2, heads_k, head_dim)", ValueError):
        flash_attn_kvpacked_func(torch.zeros(2, 20, 4, 16), torch.zeros(2, 20, 3, 4, 16))
    with raises("qkv must be (total, 3, heads, head_dim)", ValueError):
        flash_attn_varlen_qkvpacked_func(
            torch.zeros(2, 20, 3, 4, 16), torch.zeros(2, dtype=torch.int32), 20
        )


# ---- backward, merge ----


def saved_tensors(device):
    """(dout, dlse, q, k, v, out, lse), the positional arguments of bwd."""
    q, k, v = tensors(device)
    out = torch.zeros(B, SQ, HQ, DV, device=device)
    lse = torch.zeros(B, HQ, SQ, device=device)
    return [out, lse, q, k, v, out, lse]


@pytest.mark.parametrize(
    ("index", "name", "shape"),
    [
        (0, "dout", "(batch, seqlen_q, heads_q, head_dim_v) = [2, 20, 4, 24]"),
        (1, "dlse", "(batch, heads_q, seqlen_q) = [2, 4, 20]"),
        (5, "out", "(batch, seqlen_q, heads_q, head_dim_v) = [2, 20, 4, 24]"),
        (6, "lse", "(batch, heads_q, seqlen_q) = [2, 4, 20]"),
    ],
)
def test_backward_inputs(device, index, name, shape):
    arguments = saved_tensors(device)
    ops.bwd.default(*arguments)
    wrong = list(arguments)
    wrong[index] = arguments[index][..., :19]
    with raises(f"flashattn_ext: {name} must have the shape {shape}, got"):
        ops.bwd.default(*wrong)
    wrong[index] = arguments[index].half()
    with raises(f"flashattn_ext: {name} must be float32"):
        ops.bwd.default(*wrong)
    if device == "cpu":
        wrong[index] = arguments[index].to("meta")
        with raises(f"flashattn_ext: {name} must be on the device of q (cpu), got meta"):
            ops.bwd.default(*wrong)


def test_a_backward_with_dropout_needs_the_forwards_state(device):
    with raises("flashattn_ext: dropout_p > 0 needs rng_state, the one that the forward returned"):
        ops.bwd.default(*saved_tensors(device), dropout_p=0.1)


def test_varlen_backward_inputs(device):
    q, k, v, *lengths = varlen_tensors(device)
    out = torch.zeros(SQ, HQ, DV, device=device)
    lse = torch.zeros(HQ, SQ, device=device)
    ops.varlen_bwd.default(out, lse, q, k, v, out, lse, *lengths)
    with raises("dout must have the shape (total_q, heads_q, head_dim_v) = [20, 4, 24], got [19"):
        ops.varlen_bwd.default(out[:19], lse, q, k, v, out, lse, *lengths)
    with raises("lse must have the shape (heads_q, total_q) = [4, 20], got [20, 4]"):
        ops.varlen_bwd.default(out, None, q, k, v, out, lse.T, *lengths)


@pytest.mark.parametrize("create_graph_of", ["q", "bias"])
def test_double_backward_names_the_way_out(create_graph_of):
    inputs = dict(zip("qkv", tensors()), bias=torch.zeros(1, HQ, SQ, SK))
    x = inputs[create_graph_of].requires_grad_()
    out = flash_attn_func(**inputs)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with raises(
        "flashattn_ext: attention is differentiable once, and this differentiates its gradient; "
        "where a second derivative is needed (gradient penalties, Hessians), use "
        "torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for that call",
        NotImplementedError,
    ):
        gradient.sum().backward()


def test_merge(device):
    out = torch.zeros(B, SQ, HQ, DV, device=device)
    lse = torch.zeros(B, HQ, SQ, device=device)
    flashattn_ext.merge(out, lse, out, lse)
    with raises("out_a must be a floating-point tensor, got int32"):
        flashattn_ext.merge(out.int(), lse, out, lse)
    with raises("out_b must be float32 like out_a, got float16"):
        flashattn_ext.merge(out, lse, out.half(), lse)
    with raises("lse_a must be float32, got float64"):
        flashattn_ext.merge(out, lse.double(), out, lse)
    with raises(
        "out_a must be (batch, seqlen, heads, head_dim) or (tokens, heads, head_dim), got 2"
    ):
        flashattn_ext.merge(out[0, 0], lse, out, lse)
    with raises("out_b must have the shape of out_a = [2, 20, 4, 24], got [2, 20, 4, 8]"):
        flashattn_ext.merge(out, lse, out[..., :8], lse)
    with raises("lse_b must have the shape (batch, heads, seqlen) = [2, 4, 20], got [2, 20, 4]"):
        flashattn_ext.merge(out, lse, out, lse.mT)
    with raises("lse_a must have the shape (heads, tokens) = [4, 20], got [2, 4, 20]"):
        flashattn_ext.merge(out[0], lse, out[0], lse[0])


def test_merge_on_two_devices():
    out, lse = torch.zeros(B, SQ, HQ, DV), torch.zeros(B, HQ, SQ)
    for index, name in ((1, "lse_a"), (2, "out_b"), (3, "lse_b")):
        arguments = [out, lse, out, lse]
        arguments[index] = arguments[index].to("meta")
        with raises(f"{name} must be on the device of out_a (cpu), got meta"):
            flashattn_ext.merge(*arguments)


# ---- every way into an op runs the checks ----


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_checks_run_in_every_grad_mode(mode, requires_grad):
    q, k, v = (x.requires_grad_(requires_grad) for x in tensors())
    with mode(), raises("v must have the length of k (30), got 29"):
        flash_attn_func(q, k, v[:, :29])


def test_checks_run_while_compiling():
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
    q, k, v = tensors()
    with pytest.raises(Exception, match=r"v must have the length of k \(30\), got 29"):
        compiled(q, k, v[:, :29])


def test_cuda_tensors_in_a_build_without_cuda():
    with raises(
        "flashattn_ext: this build holds the CPU path only (no nvcc was found), and the tensors "
        "are on a CUDA device; rebuild with a CUDA toolkit",
        NotImplementedError,
    ):
        _no_cuda.refusal("no nvcc was found")(*tensors())


@pytest.mark.skipif(
    build_info()["cuda"] != "", reason="this build has real CUDA kernels behind the ops"
)
@pytest.mark.parametrize("op", _no_cuda.OPS)
def test_a_build_without_cuda_refuses_cuda_tensors(op):
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    q, k, v, *lengths = varlen_tensors() if op.startswith("varlen") else tensors()
    lse = torch.zeros(1)
    arguments = {
        "fwd": (q, k, v),
        "bwd": (q, lse, q, k, v, q, lse),
        "merge": (q, lse, q, lse),
    }[op.removeprefix("varlen_")]
    with raises("this build holds the CPU path only", NotImplementedError):
        getattr(ops, op).default.redispatch(cuda, *arguments, *lengths)


# ---- on a GPU ----


@pytest.mark.gpu
def test_cuda_refuses_what_its_kernels_do_not_have():
    q, k, v = (x.cuda() for x in tensors(dtype=torch.bfloat16))
    assert flash_attn_func(q, k, v).shape == (B, SQ, HQ, DV)
    with raises("sm80: it takes float16 and bfloat16 and q is float32", NotImplementedError):
        flash_attn_func(q.float(), k.float(), v.float())
    with raises("sm80: head dim 12 of q and k is not a multiple of 8", NotImplementedError):
        flash_attn_func(q[..., :12], k[..., :12], v)
    with raises("plan='spec' does not run this call: it runs on CPU", NotImplementedError):
        flash_attn_func(q, k, v, plan="spec")
    options = {
        "bias": torch.zeros(1, 1, 1, SK, device="cuda"),
        "mask": torch.ones(1, 1, 1, SK, dtype=torch.bool, device="cuda"),
        "alibi_slopes": torch.zeros(HQ, device="cuda"),
        "rel_bias": torch.zeros(HQ, 3, device="cuda"),
        "sink": torch.zeros(HQ, device="cuda"),
        "block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cuda"),
        "dropout_p": 0.5,
    }
    for name, option in options.items():
        with raises(f"sm80: {name} is not in the CUDA kernels", NotImplementedError):
            flash_attn_func(q, k, v, **{name: option})


@pytest.mark.gpu
def test_a_refused_call_launches_nothing():
    q, k, v = (x.cuda() for x in tensors(dtype=torch.bfloat16))
    flash_attn_func(q, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for bad in ({"k": k.cpu()}, {"v": v.half()}, {"softcap": -1.0}, {"dropout_p": 0.5}):
            with pytest.raises(RuntimeError, match="flashattn_ext: "):
                flash_attn_func(**({"q": q, "k": k, "v": v} | bad))
        torch.cuda.synchronize()
    assert not [event.name for event in profile.events() if "flash_" in event.name]
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_cuda_and_cpu_tensors_together():
    q, k, v = tensors(dtype=torch.bfloat16)
    with raises("k must be on the device of q (cpu), got cuda:0"):
        flash_attn_func(q, k.cuda(), v)
    with raises("k must be on the device of q (cuda:0), got cpu"):
        flash_attn_func(q.cuda(), k, v.cuda())
    inputs = [x.cuda().bfloat16() if x.is_floating_point() else x for x in varlen_tensors()[:5]]
    with raises("cu_seqlens_q must be on the device of q (cuda:0), got cpu"):
        flash_attn_varlen_func(*inputs, 10, 15)
    with raises("max_seqlen_q is a tensor on cuda:0, and reading it would wait", ValueError):
        flash_attn_varlen_func(*inputs, torch.tensor(10, device="cuda"), 15)
    with raises(
        "merge on CUDA takes float16 and bfloat16 and out_a is float32", NotImplementedError
    ):
        out, lse = torch.zeros(1, 2, 1, 8).cuda(), torch.zeros(1, 1, 2).cuda()
        flashattn_ext.merge(out, lse, out, lse)
    with raises("merge on CUDA takes head dims that are a multiple of 8", NotImplementedError):
        out, lse = torch.zeros(1, 2, 1, 4).cuda().half(), torch.zeros(1, 1, 2).cuda()
        flashattn_ext.merge(out, lse, out, lse)
