"""The CUDA kernels without a GPU: their sources on the emulator of `tests/emulator/`.

What the emulator cannot see: races, whatever depends on time, and how fast anything is. The tests
on a GPU run the same kernels on real sizes.
"""

import subprocess

import emulated
import harness
import pytest
import torch
from cases import Case, Options, VarlenCase, heads_first

REASON = emulated.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"emulating the kernels {REASON}")


def small(head_dim, seqlen_q=70, seqlen_k=75, **fields):
    few = {"batch": 1, "heads_q": 2, "heads_k": 1}
    return Case(head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **few | fields)


def check(case, forward="sm80", backward="sm80", rows=None, *, with_dlse=False, change=None):
    """The accuracy rule for out, lse and every gradient."""
    x, options = harness.inputs_of(case, "cpu"), case.options.kwargs()
    if change is not None:
        change(x)
    actual = emulated.run(x, options, forward, backward, rows, with_dlse=with_dlse)
    from_rounded_out = harness.moved_by_rounding(case)
    harness.check_results(
        actual, x, options, with_dlse=with_dlse, from_rounded_out=from_rounded_out
    )


def whole_tables():
    """(what runs, kernel) for every kernel."""
    for family, kernel in emulated.FORWARDS.items():
        yield pytest.param({"forward": family}, kernel, id=kernel)
    for family, kernels in emulated.BACKWARDS.items():
        for kernel in kernels:
            yield pytest.param({"backward": family}, kernel, id=kernel)


@pytest.mark.parametrize(("families", "kernel"), list(whole_tables()))
def test_every_tile(families, kernel):
    """Each row of the kernel's table, with blocks of queries and keys that it does not fill."""
    for row, (bucket, bucket_v, block_m, block_n) in enumerate(emulated.tiles(kernel)):
        case = small(
            bucket,
            block_m + 5,
            block_n + 9,
            head_dim_v=bucket_v,
            heads_q=1,
            dtype=(torch.bfloat16, torch.float16)[row % 2],
            options=Options(causal=True),
        )
        check(case, rows={kernel: row}, **families)


FAMILIES = {
    "sm80": {},
    "sm90": {"forward": "sm90", "backward": "sm90"},
    "sm90_fused": {"backward": "sm90_fused", "rows": {"sm90.bwd_fused": 0}},
    "sm90_fused in order": {"backward": "sm90_fused", "rows": {"sm90.bwd_fused": 1}},
}
families = pytest.mark.parametrize("families", FAMILIES.values(), ids=FAMILIES)


@families
@pytest.mark.parametrize(
    "case",
    [
        small(64),
        small(64, 1, 200, options=Options(causal=True)),
        small(64, 200, 1),
        small(64, 150, 90, options=Options(causal=True)),  # rows that see no key
        small(64, 90, 150, options=Options(causal="top_left")),
        small(64, 300, 300, heads_q=1, options=Options(window_size=(20, 5))),
        small(64, options=Options(causal=True, softmax_scale=0.4), dtype=torch.float16),
        small(32, batch=2, heads_q=6, heads_k=2),
        small(40, head_dim_v=56, options=Options(causal=True)),
    ],
    ids=str,
)
def test_dense(case, families):
    check(case, **families, with_dlse=True)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_softcap(family):
    options = Options(window_size=(-1, 40), softcap=5.0)
    check(small(64, 140, 140, options=options), **FAMILIES[family], with_dlse=True)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 72), (40, 104), (104, 8), (136, 200)])
def test_head_dims(family, head_dim, head_dim_v):
    check(small(head_dim, head_dim_v=head_dim_v), **FAMILIES[family])


@families
def test_packed(families):
    case = VarlenCase(
        lengths_q=(65, 0, 3, 140),
        lengths_k=(70, 5, 0, 141),
        head_dim=64,
        heads_q=2,
        heads_k=1,
        options=Options(causal=True),
    )
    check(case, **families, with_dlse=True)


@families
def test_any_strides(families):
    def transpose(x):
        for name in ("q", "k", "v", "dout"):
            setattr(x, name, heads_first(getattr(x, name)))

    check(small(64, batch=2, heads_k=2), **families, change=transpose)


# ---- The emulator itself ----

PROGRAM = """
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
namespace flashattn_ext::sm80 {{ extern unsigned char smem[]; }}
using namespace flashattn_ext;
void kernel(int* seen) {{
  const uint32_t shared = ptx::smem_address(sm80::smem) + 4 * threadIdx.x;
  {body}
}}
int main() {{
  int seen[64] = {{}};
  emulator::Launch{{1, 64, 256, nullptr}}(kernel, seen);
  return seen[0];
}}
"""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """Its object file."""
    source = emulated.EMULATOR / "emulator.cpp"
    return emulated.compile_one(source, tmp_path_factory.mktemp("emulator"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("if (threadIdx.x != 3) __syncthreads(); seen[0] = 7;", None),  # it has ended
        ("if (threadIdx.x < 32) __syncwarp(); else __any_sync(-1, 1); seen[0] = 7;", None),
        ("seen[0] = ptx::load_shared<int>(shared) == -1 ? 7 : 1;", None),  # bits of a NaN
        ("if (threadIdx.x % 2) __syncwarp(); else __any_sync(-1, 1);", "have parted"),
        ("if (threadIdx.x != 3) __syncwarp();", "waits for another"),
        ("if (threadIdx.x < 32) ptx::named_barrier_sync(1, 64);", "waits for another"),
        ("ptx::st_shared_b32(shared + 4, 0);", "outside of shared memory"),
        ("ptx::ld_shared_b32(shared + 2 * threadIdx.x);", "a misaligned shared address"),
        (
            "int x = 7; ptx::cp_async_4(shared, &x, true); ptx::cp_async_commit_group();"
            "ptx::cp_async_wait_group<1>(); seen[0] = ptx::load_shared<int>(shared);",
            "exit 255",  # not waited for: not there
        ),
        (
            "int x = 7; ptx::cp_async_4(shared, &x, true); ptx::cp_async_commit_group();"
            "ptx::cp_async_wait_group<0>(); seen[0] = ptx::load_shared<int>(shared);",
            None,
        ),
    ],
)
def test_the_emulator(body, said, emulator, tmp_path):
    """It runs what is right (exit status 7) and says what is wrong."""
    source = tmp_path / "source.cu"
    source.write_text(PROGRAM.format(body=body))
    program = tmp_path / "program"
    objects = (emulator, emulated.compile_one(source, tmp_path))
    subprocess.run(["g++", *map(str, objects), "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    printed = f"{result.stderr} exit {result.returncode}"
    assert (said or "exit 7") in printed
