"""The ops as torch sees them: opcheck, compile, export, autocast, checkpointing, hooks.

Bodies run on the CPU path and, marked `gpu`, on the CUDA path.
"""

import warnings

import harness
import pytest
import torch
import torch._dynamo.testing
from cases import Case, VarlenCase, heads_first, make_tensors, make_varlen_tensors

import flashattn_ext
from flashattn_ext import flash_attn_func, flash_attn_varlen_func

OPS = torch.ops.flashattn_ext
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def leaf(x):
    return x.detach().requires_grad_()


def dense_arguments(device, **shape):
    x = make_tensors(Case(**{"seqlen_q": 33, "seqlen_k": 47, **shape}), device)
    return [leaf(t) for t in (x.q, x.k, x.v)], x


def varlen_arguments(device):
    case = VarlenCase(lengths_q=(33, 0, 20), lengths_k=(40, 3, 20), tail_q=2, tail_k=2)
    x = make_varlen_tensors(case, device, unowned=0.0)
    lengths = [x.lengths[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
    lengths += [x.lengths["max_seqlen_q"], x.lengths["max_seqlen_k"]]
    return [leaf(t) for t in (x.q, x.k, x.v)], lengths, x


FWD_OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "top_left": True, "softmax_scale": 0.3},
    {"window_left": 10, "window_right": 4, "softcap": 15.0, "deterministic": True},
]


@pytest.mark.no_poison  # opcheck compares with allclose, which NaN would fail
@pytest.mark.parametrize("options", FWD_OPTIONS, ids=str)
def test_opcheck_fwd(device, options):
    inputs, _ = dense_arguments(device)
    torch.library.opcheck(OPS.fwd.default, inputs, options, test_utils=OPCHECKS)


@pytest.mark.no_poison  # opcheck compares with allclose, which NaN would fail
@pytest.mark.parametrize("layout", ["heads_first", "expanded", "wide_batch", "empty"])
def test_opcheck_fwd_layouts(device, layout):
    """Fake strides must equal real ones for every layout (PT#180445: also B = 65536)."""
    if layout == "wide_batch":
        sizes = {"seqlen_q": 1, "seqlen_k": 2, "heads_q": 1, "heads_k": 1, "head_dim": 8}
        inputs, _ = dense_arguments(device, batch=65536, **sizes)
    elif layout == "empty":
        inputs, _ = dense_arguments(device, seqlen_k=0)
    else:
        inputs, x = dense_arguments(device)
        if layout == "heads_first":
            tensors = [heads_first(t) for t in (x.q, x.k, x.v)]
        else:
            tensors = [x.q, *(t[:1, :, :1].expand(2, -1, 2, -1) for t in (x.k, x.v))]
        inputs = [leaf(t) for t in tensors]
    torch.library.opcheck(OPS.fwd.default, inputs, {"causal": True}, test_utils=OPCHECKS)


@pytest.mark.no_poison  # opcheck compares with allclose, which NaN would fail
@pytest.mark.parametrize("used", [False, True])
def test_opcheck_varlen_fwd(device, used):
    inputs, lengths, _ = varlen_arguments(device)
    options = {"causal": True}
    if used:
        options["seqused_k"] = torch.tensor([7, 3, 0], dtype=torch.int32, device=device)
    torch.library.opcheck(OPS.varlen_fwd.default, [*inputs, *lengths], options, test_utils=OPCHECKS)


@pytest.mark.no_poison  # opcheck compares with allclose, which NaN would fail
def test_opcheck_bwd(device):
    inputs, x = dense_arguments(device)
    inputs = [t.detach() for t in inputs]
    out, lse, _ = OPS.fwd(*inputs, causal=True)
    for dlse in (None, x.dlse):
        arguments = [x.dout, dlse, *inputs, out, lse]
        torch.library.opcheck(OPS.bwd.default, arguments, {"causal": True}, test_utils=OPCHECKS)


@pytest.mark.no_poison  # opcheck compares with allclose, which NaN would fail
def test_opcheck_varlen_bwd(device):
    inputs, lengths, x = varlen_arguments(device)
    inputs = [t.detach() for t in inputs]
    out, lse, _ = OPS.varlen_fwd(*inputs, *lengths, causal=True)
    arguments = [x.dout, x.dlse, *inputs, out, lse, *lengths]
    torch.library.opcheck(OPS.varlen_bwd.default, arguments, {"causal": True}, test_utils=OPCHECKS)


@pytest.mark.no_poison  # opcheck compares with allclose, which NaN would fail
def test_opcheck_merge(device):
    inputs, _ = dense_arguments(device)
    states = [t.detach() for causal in (False, True) for t in OPS.fwd(*inputs, causal=causal)[:2]]
    states = [leaf(t) for t in states]
    torch.library.opcheck(OPS.merge.default, states, test_utils=OPCHECKS)


BACKEND = {"cpu": "aot_eager", "cuda": "inductor"}


def model(q, k, v):
    """Attention between two pointwise operations, so that a compiler has something to fuse."""
    out, lse = flash_attn_func(q * 1.5, k, v, causal=True, return_lse=True)
    return (out * 2).sin(), lse.clamp(min=-30.0)


def loss_gradients(function, leaves):
    out, lse = function(*leaves)
    return out, lse, *torch.autograd.grad(out.float().sum() + lse.sum(), leaves)


def assert_all_close(actual, wanted):
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.no_poison
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(device, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=BACKEND[device])
    for seqlen in (33, 70) if dynamic else (33,):
        leaves, _ = dense_arguments(device, seqlen_q=seqlen, seqlen_k=seqlen + 14)
        assert_all_close(loss_gradients(compiled, leaves), loss_gradients(model, leaves))


@pytest.mark.no_poison
def test_compile_does_not_specialise_on_lengths(device):
    """What was compiled for the first length serves every other one."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for seqlen in (33, 64, 70, 129):
        leaves, _ = dense_arguments(device, seqlen_q=seqlen, seqlen_k=seqlen)
        compiled(*leaves)
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert counts[1:] == counts[:1] * 3, counts


@pytest.mark.no_poison
def test_compile_varlen(device):
    torch._dynamo.reset()

    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k):
        out = flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal=True)
        return out * 2

    compiled = torch.compile(packed, fullgraph=True, dynamic=True, backend=BACKEND[device])
    inputs, lengths, x = varlen_arguments(device)
    actual, wanted = compiled(*inputs, *lengths), packed(*inputs, *lengths)
    torch.testing.assert_close(actual, wanted)
    for a, b in zip(
        torch.autograd.grad(actual, inputs, x.dout), torch.autograd.grad(wanted, inputs, x.dout)
    ):
        torch.testing.assert_close(a, b)


def test_export_with_dynamic_lengths(device):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    x = make_tensors(Case(seqlen_q=32, seqlen_k=32), device)
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    shapes = {name: {1: seqlen} for name in "qkv"}
    program = torch.export.export(Attention(), (x.q, x.k, x.v), dynamic_shapes=shapes)
    assert any("flashattn_ext.fwd" in str(node.target) for node in program.graph.nodes)
    other = make_tensors(Case(seqlen_q=75, seqlen_k=75), device)
    actual = program.module()(other.q, other.k, other.v)
    assert torch.equal(actual, flash_attn_func(other.q, other.k, other.v, causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """fp32 inputs under autocast run in its dtype and get fp32 gradients."""
    x = make_tensors(Case(dtype=torch.float32, seqlen_q=70, seqlen_k=70), "cuda")
    leaves = [leaf(t) for t in (x.q, x.k, x.v)]
    with torch.autocast("cuda", dtype=dtype):
        out = flash_attn_func(*leaves, causal=True)
    assert out.dtype == dtype
    gradients = torch.autograd.grad(out, leaves, x.dout.to(dtype))
    cast = [leaf(t.to(dtype)) for t in (x.q, x.k, x.v)]
    wanted = flash_attn_func(*cast, causal=True)
    assert torch.equal(out, wanted)
    for gradient, plain in zip(gradients, torch.autograd.grad(wanted, cast, x.dout.to(dtype))):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient.to(dtype), plain)


@pytest.mark.gpu
def test_autocast_varlen():
    case = VarlenCase(lengths_q=(33, 20), lengths_k=(33, 20), dtype=torch.float32)
    x = make_varlen_tensors(case, "cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = flash_attn_varlen_func(x.q, x.k, x.v, **x.lengths)
    cast = [t.bfloat16() for t in (x.q, x.k, x.v)]
    assert torch.equal(out, flash_attn_varlen_func(*cast, **x.lengths))


def test_activation_checkpointing(device):
    leaves, x = dense_arguments(device)
    wanted = torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, x.dout)

    def attend(q, k, v):
        return flash_attn_func(q, k, v, causal=True)

    out = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=False)
    for actual, plain in zip(torch.autograd.grad(out, leaves, x.dout), wanted):
        assert torch.equal(actual, plain)


def test_saved_tensor_hooks_see_what_is_saved(device):
    """q, k, v, out and lse are saved as ordinary tensors, so that they can be offloaded."""
    leaves, x = dense_arguments(device)
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor.cpu()

    def unpack(tensor):
        return tensor.to(device)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out, lse = flash_attn_func(*leaves, causal=True, return_lse=True)
    for tensor in (*leaves, out, lse):
        assert tuple(tensor.shape) in shapes
    wanted = harness.run(x, {"causal": True})
    for actual, name in zip(torch.autograd.grad(out, leaves, x.dout), ("dq", "dk", "dv")):
        assert torch.equal(actual, wanted[name])


def test_no_graph_where_no_gradient_is_wanted(device):
    leaves, x = dense_arguments(device)
    with torch.no_grad():
        assert not flash_attn_func(*leaves).requires_grad
    with torch.inference_mode():
        assert flash_attn_func(*leaves).is_inference()
    assert not flash_attn_func(x.q, x.k, x.v).requires_grad
    out, lse = flash_attn_func(*leaves, return_lse=True)
    assert out.requires_grad
    assert lse.requires_grad


def test_vmap_over_a_batch(device):
    """No rule of its own: torch loops over the batch and warns; the result is right."""
    x = make_tensors(Case(batch=6, seqlen_q=20, seqlen_k=20), device)
    stacked = [t.unflatten(0, (3, 2)) for t in (x.q, x.k, x.v)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch.vmap(flash_attn_func)(*stacked)
    wanted = {"out": flash_attn_func(x.q, x.k, x.v).view_as(out)}
    harness.assert_same_kernel(device, {"out": out}, wanted)


def test_meta_tensors_have_the_real_shapes(device):
    leaves, _ = dense_arguments(device)
    real = OPS.fwd(*leaves)
    fake = OPS.fwd(*(t.detach().to("meta") for t in leaves))
    for a, b in zip(real, fake, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()


def test_every_public_name_has_a_docstring():
    for name in flashattn_ext.__all__:
        assert (getattr(flashattn_ext, name).__doc__ or "").strip(), name
