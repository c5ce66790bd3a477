"""The examples train, agree with unfused attention, and notice when they do not."""

import dataclasses
import itertools

import pytest
import torch

from examples import bias_blocks, train_gpt

TINY = dataclasses.replace(train_gpt.CPU, layers=1, context=48, tokens=192)
MODES = pytest.mark.parametrize("mode", [[], ["--varlen"]], ids=["dense", "packed"])


@MODES
def test_demo_trains_and_agrees(mode, monkeypatch, capsys):
    monkeypatch.setattr(train_gpt, "CPU", TINY)
    assert train_gpt.main(["--device", "cpu", "--steps", "12", *mode]) == 0
    printed = capsys.readouterr().out
    assert "spec" in printed  # the plan that ran
    assert ": same" in printed
    assert ": fell" in printed


@MODES
def test_demo_fails_on_another_attention(mode, monkeypatch, capsys):
    def without_mask(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True
        ).transpose(1, 2)

    monkeypatch.setattr(train_gpt, "CPU", TINY)
    monkeypatch.setattr(train_gpt, "textbook_attention", without_mask)
    assert train_gpt.main(["--device", "cpu", "--steps", "3", *mode]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_packed_batches_are_paragraphs_end_to_end():
    text = b"first paragraph\n\nthe second one\n\nthird"
    batch = next(train_gpt.packed_batches(text, TINY, seed=0))
    bounds = batch.cu_seqlens.tolist()
    assert (bounds[0], bounds[-1], batch.inputs.shape) == (0, TINY.tokens, (1, TINY.tokens))
    for start, end in itertools.pairwise(bounds):
        assert batch.positions[0, start:end].tolist() == list(range(end - start))
        inputs, targets = batch.inputs[0, start:end], batch.targets[0, start:end]
        assert bytes([*inputs.tolist(), int(targets[-1])]) in text
        assert torch.equal(targets[:-1], inputs[1:])


@pytest.mark.gpu
@MODES
def test_demo_on_the_gpu(mode, capsys):
    assert train_gpt.main(["--device", "cuda", "--steps", "40", *mode]) == 0
    assert "sm80" in capsys.readouterr().out


BLOCKS = pytest.mark.parametrize("make", [bias_blocks.Distances, bias_blocks.Blanks])


@BLOCKS
def test_blocks_with_a_bias_train_and_agree(make, capsys):
    assert bias_blocks.compare(make, 30)
    printed = capsys.readouterr().out
    assert ": same" in printed
    assert ": fell" in printed


@BLOCKS
def test_blocks_notice_a_missing_bias(make, monkeypatch, capsys):
    unfused = bias_blocks.unfused_attention

    def without_bias(q, k, v, softmax_scale=None, **_):
        return unfused(q, k, v, softmax_scale)

    monkeypatch.setattr(bias_blocks, "unfused_attention", without_bias)
    assert not bias_blocks.compare(make, 12)
    assert "DIFFERENT" in capsys.readouterr().out


def test_buckets_of_t5():
    buckets = bias_blocks.bidirectional_buckets(128).tolist()
    before, own, behind = buckets[127::-1], buckets[128], buckets[129:]
    assert own == 0
    assert before[:8] == list(range(1, 9))
    assert (before[-1], len(set(before))) == (15, 15)
    assert before == sorted(before)
    assert behind == [16 + bucket for bucket in before]
