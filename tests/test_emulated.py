"""The portable CUDA kernels without a GPU: their sources on the emulator of `tests/emulator/`.

What the emulator cannot see: other threads' timing (races), and how fast anything is. The tests on
a GPU run the same kernels on real sizes.
"""

import subprocess

import compare
import emulated
import harness
import pytest
import torch
from cases import Case, Options, VarlenCase, heads_first

REASON = emulated.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


def small(head_dim, seqlen_q=70, seqlen_k=75, **fields):
    few = {"batch": 1, "heads_q": 2, "heads_k": 1}
    return Case(head_dim=head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **few | fields)


def check(case, rows=None, *, with_dlse=False, change=None):
    """The accuracy rule for out, lse and every gradient."""
    x, options = harness.inputs_of(case, "cpu"), case.options.kwargs()
    if change is not None:
        change(x)
    actual = emulated.run(x, options, rows, with_dlse=with_dlse)
    exact = {"with_dlse": with_dlse, "out": actual["out"] if few_keys(case) else None}
    compare.assert_accurate(
        actual,
        harness.expected(x, options, **exact),
        harness.expected(x, options, with_dlse=with_dlse, same_dtype=True),
        dtype=x.q.dtype,
        dout=torch.nan_to_num(x.dout),
        v=torch.nan_to_num(x.v),
    )


def few_keys(case):
    return harness.keys_per_row(case) < 16


@pytest.mark.parametrize("kernel", emulated.KERNELS)
def test_every_tile(kernel):
    """Each row of the kernel's table, with blocks of queries and keys that it does not fill."""
    for row, (bucket, block_m, block_n, *_) in enumerate(emulated.tiles(kernel)):
        dtype = (torch.bfloat16, torch.float16)[row % 2]
        heads = {"heads_q": 1, "dtype": dtype, "options": Options(causal=True)}
        check(small(bucket, block_m + 5, block_n + 9, **heads), {kernel: row})


@pytest.mark.parametrize(
    "case",
    [
        small(64),
        small(64, 1, 200, options=Options(causal=True)),
        small(64, 200, 1),
        small(64, 150, 90, options=Options(causal=True)),  # rows that see no key
        small(64, 90, 150, options=Options(causal="top_left")),
        small(64, 140, 140, options=Options(window_size=(20, 5))),
        small(64, 140, 140, options=Options(window_size=(-1, 40), softcap=5.0)),
        small(64, options=Options(causal=True, softmax_scale=0.4), dtype=torch.float16),
        small(32, batch=2, heads_q=6, heads_k=2),
        small(72),
        small(40, head_dim_v=104),
        small(104, head_dim_v=8, options=Options(causal=True)),
    ],
    ids=str,
)
def test_dense(case):
    check(case, with_dlse=True)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed(head_dim):
    case = VarlenCase(
        lengths_q=(65, 0, 3, 40),
        lengths_k=(70, 5, 0, 41),
        head_dim=head_dim,
        heads_q=2,
        heads_k=1,
        options=Options(causal=True),
    )
    check(case, with_dlse=True)


def test_any_strides():
    def transpose(x):
        for name in ("q", "k", "v", "dout"):
            setattr(x, name, heads_first(getattr(x, name)))

    check(small(64, batch=2, heads_k=2), change=transpose)


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
