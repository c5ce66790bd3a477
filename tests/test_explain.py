"""explain and show_config: what they take and what they say."""

import json

import pytest
import torch

import flashattn_ext
from flashattn_ext import explain
from flashattn_ext.plan import DEVICES

SHAPES = ((2, 300, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64))


def test_tensors_and_shapes_give_the_same_plan():
    tensors = [torch.empty(shape, dtype=torch.float16) for shape in SHAPES]
    metas = [torch.empty(shape, dtype=torch.float16, device="meta") for shape in SHAPES]
    plan = explain(*SHAPES, causal=True, dtype=torch.float16, device="a100")
    assert explain(*tensors, causal=True, device="a100") == plan
    assert explain(*metas, causal=True, device="a100") == plan


def test_the_device_is_that_of_q():
    q, k, v = (torch.empty(shape) for shape in SHAPES)
    assert explain(q, k, v).device == DEVICES["cpu"]
    assert explain(q, k, v).family == "spec"
    assert explain(q, k, v, device="cpu").family == "spec"
    assert explain(q, k, v, device=torch.device("cpu")).family == "spec"


def test_an_unknown_device_is_a_sentence():
    with pytest.raises(
        ValueError, match=r"device must be a torch device or one of cpu, a100, .*'gtx'"
    ):
        explain(*SHAPES, device="gtx")


@pytest.mark.gpu
def test_the_running_gpu_is_read():
    plan = explain(*SHAPES)
    facts = torch.cuda.get_device_properties(0)
    assert plan.device.name == facts.name
    assert plan.device.num_sms == facts.multi_processor_count
    assert plan.device.compute_capability == (facts.major, facts.minor)
    assert plan.family is not None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family",
    [
        None,
        *(pytest.param(name, marks=pytest.mark.sm90) for name in ("sm90_fused", "sm90")),
        "sm80",
    ],
)
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("heads", [1, 64], ids=["a few tiles", "more tiles than SMs"])
def test_the_kernels_named_are_the_kernels_that_run(heads, varlen, backward, family):
    shapes = [(batch, rows, heads * h, dim) for batch, rows, h, dim in SHAPES]
    shapes = [shape[1:] if varlen else shape for shape in shapes]
    tensors = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    ]
    lengths = ()
    if varlen:
        cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
        lengths = (cu_seqlens, cu_seqlens, 200, 200)
    function = flashattn_ext.flash_attn_varlen_func if varlen else flashattn_ext.flash_attn_func
    plan = explain(*tensors, *lengths, causal=True, backward=backward, plan=family)

    out = function(*tensors, *lengths, causal=True, plan=family)
    dout = torch.ones_like(out)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        if backward:
            out.backward(dout)
        else:
            function(*(x.detach() for x in tensors), *lengths, causal=True, plan=family)
        torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    ran = [event.name for event in events if "flash_" in event.name]
    assert len(ran) == len(plan.kernels), ran
    for name, kernel in zip(ran, plan.kernels):
        assert kernel.name in name


def test_what_the_call_refuses_is_refused_here():
    q, k, v = SHAPES
    with pytest.raises(RuntimeError, match="heads of q must be a multiple"):
        explain(q, (2, 300, 3, 64), (2, 300, 3, 64))
    with pytest.raises(RuntimeError, match="window_left must be -1"):
        explain(q, k, v, window_size=(-2, 0))
    with pytest.raises(ValueError, match="causal must be"):
        explain(q, k, v, causal="left")
    with pytest.raises(ValueError, match="with cu_seqlens_q go cu_seqlens_k, max_seqlen_q and"):
        explain(q[1:], k[1:], v[1:], (3,), (3,))
    with pytest.raises(RuntimeError, match="bias must broadcast to"):
        explain(q, k, v, bias=torch.zeros(1, 1, 3, 300))


def test_a_plan_prints_what_matters():
    h200 = "h200 (compute capability 9.0, 132 SMs, 227 KB of shared memory per block)"
    text = str(explain(*SHAPES, causal=True, backward=True, device="h200"))
    for part in (
        f"bwd on {h200}: sm90_fused\n",
        "flash_bwd_delta_kernel",
        "flash_bwd_fused_sm90_kernel: tile ",
        "flash_bwd_dq_convert_sm90_kernel",
        "bytes = num_heads_q * batch * (8 * seqlen_q + 4 * bucket * Br * ceil(seqlen_q / Br))",
        "copied to a contiguous tensor first: none",
        "window: left unlimited, right 0",
        "not sm90: it runs this call and was not the one chosen",
        "not sm80: it runs this call and was not the one chosen",
        "not spec: it runs on CPU tensors",
    ):
        assert part in text
    text = str(explain(*SHAPES, softcap=9.0, backward=True, device="h200"))
    for part in (
        f"bwd on {h200}: sm90\n",
        "flash_bwd_delta_kernel",
        "flash_bwd_dq_sm90_kernel: tile ",
        "flash_bwd_dkv_sm90_kernel: tile ",
        "workspace: 19200 bytes = 8 * num_heads_q * batch * seqlen_q",
        "not sm90_fused: it has no softcap and takes a softmax_scale above 0 alone",
    ):
        assert part in text
    text = str(explain((2, 3000, 32, 64), *SHAPES[1:], device="h200"))
    for part in (
        f"fwd on {h200}: sm90",
        "flash_fwd_sm90_kernel: tile ",
        "grid 264\n",
        "workspace: 4 bytes = one counter of tiles",
        "not sm90_fused: its forward is that of sm90",
        "not sm80: it runs this call and was not the one chosen",
    ):
        assert part in text
    repeated = torch.empty(2, 300, 1, 64).bfloat16().expand(-1, -1, 2, -1)
    text = str(explain(SHAPES[0], repeated, repeated, device="h200"))
    assert "fwd on h200" in text
    assert "not sm90: k repeats a dimension in place (stride 0)" in text
    text = str(explain(*SHAPES, device="cpu"))
    assert "fwd on cpu: spec" in text
    assert "not sm80: it runs on CUDA tensors" in text
    text = str(explain(*SHAPES, sink=torch.zeros(4), device="h200"))
    assert "fwd on h200" in text
    assert "raises\n  flashattn_ext: no kernel runs this call. sm90_fused, sm90, sm80: sink" in text


def test_a_plan_says_where_bits_may_differ_between_runs():
    """In a backward that sums dq in no order, such as that of sm90_fused by its name."""
    sentence = "\n  dq is summed in no fixed order: deterministic=True makes it repeatable\n"
    named = {"device": "h200", "plan": "sm90_fused"}
    plan = explain(*SHAPES, **named, backward=True)
    assert plan.as_dict()["deterministic"] is plan.deterministic is False
    assert sentence in str(plan)
    for plan in (
        explain(*SHAPES, **named, backward=True, deterministic=True),
        explain(*SHAPES, **named),
        *(
            explain(*SHAPES, device=device, backward=backward)
            for device in DEVICES
            for backward in (False, True)
        ),
    ):
        assert plan.deterministic is True
        assert "deterministic=True" not in str(plan)


def test_a_plan_is_plain_data():
    plan = explain(*SHAPES, device="h200")
    data = plan.as_dict()
    assert json.loads(json.dumps(data))["family"] == "sm90"
    assert data["kernels"][0]["name"] == "flash_fwd_sm90_kernel"
    assert data["device"]["compute_capability"] == (9, 0)
    kernel = plan.kernels[0]
    assert plan.summary == (
        f"sm90 fwd {kernel.block_m}x{kernel.block_n} {kernel.num_warps} warps "
        f"{kernel.stages} stages"
    )
    assert explain(*SHAPES, device="cpu").summary == "spec fwd"
    assert explain(*SHAPES, device="h200", dtype=torch.float32).summary == "nothing fwd"


def test_empty_calls_are_explained():
    shapes = ((0, 300, 4, 64), (0, 300, 2, 64), (0, 300, 2, 64))
    assert "nothing to compute: the outputs are filled" in str(explain(*shapes, device="h200"))


def test_show_config_names_build_and_families(capsys):
    flashattn_ext.show_config()
    text = capsys.readouterr().out
    info = flashattn_ext.build_info()
    assert f"flashattn_ext {flashattn_ext.__version__}" in text
    assert f"torch {info['torch']}" in text
    assert "sm90_fused: " in text
    assert "sm90: " in text
    assert "sm80: " in text
    assert "spec: " in text
    if info["cuda"]:
        assert f"CUDA {info['cuda']} for compute capabilities" in text
    else:
        assert f"no CUDA: {info['no_cuda_reason']}; only the CPU path runs" in text
