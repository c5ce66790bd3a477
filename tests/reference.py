"""Dense, unfused attention with autograd: what every path is compared with.

Written for clarity alone, and independent of `flashattn_ext.spec`: the whole score matrix, one
softmax, and torch's own autograd for every gradient. `run` and `run_varlen` compute in fp64 by
default; with `same_dtype=True` they compute in the inputs' own types as an eager PyTorch model
would, which gives the error budget of criterion 2 in `compare`.

Layouts are the library's: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), lse (B, Hq, Sq);
varlen q (total_q, Hq, D), lse (Hq, total_q).
"""

import math

import torch

# Tensor options that have a gradient, in the order of the ops' outputs.
GRAD_OPTIONS = ("bias", "key_bias", "alibi_slopes", "rel_bias", "sink")
BLOCK_MASK_TILE = 128


def visible_pairs(seqlen_q, seqlen_k, causal=False, window_size=(-1, -1), device="cpu"):
    """(Sq, Sk) bool, True where query i may see key j; and r = j - (i + off), (Sq, Sk) int64.

    `causal` is False, True or "bottom_right" (off = Sk - Sq), or "top_left" (off = 0 for every
    option that depends on the position).
    """
    off = 0 if causal == "top_left" else seqlen_k - seqlen_q
    i = torch.arange(seqlen_q, device=device)[:, None]
    j = torch.arange(seqlen_k, device=device)[None, :]
    r = j - (i + off)
    visible = torch.ones_like(r, dtype=torch.bool)
    left, right = window_size
    if left >= 0:
        visible &= r >= -left
    if right >= 0:
        visible &= r <= right
    if causal:
        visible &= r <= 0
    return visible, r


def attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    softcap=0.0,
    causal=False,
    window_size=(-1, -1),
    bias=None,
    mask=None,
    alibi_slopes=None,
    rel_bias=None,
    sink=None,
    block_mask=None,
    dropout_p=0.0,
    dropout_mask=None,
):
    """Attention with the whole (B, Hq, Sq, Sk) score matrix, in the inputs' types.

    `dropout_mask` is the (B, Hq, Sq, Sk) bool keep mask that goes with `dropout_p`.
    Returns out (B, Sq, Hq, Dv), lse (B, Hq, Sq) and seen (B, Hq, Sq, Sk) bool.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k = k.shape[1:3]
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads_q // heads_k, dim=1) for x in (k, v))

    s = (q * scale) @ k.transpose(-2, -1)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    visible, r = visible_pairs(seqlen_q, seqlen_k, causal, window_size, q.device)
    dtype = s.dtype
    if bias is not None:
        s = s + bias
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        s = s - slopes[:, :, None, None] * r.abs()
    if rel_bias is not None:
        reach = rel_bias.shape[1] // 2
        s = s + rel_bias[:, reach + r.clamp(-reach, reach)]
    # fp32 options widened the scores: back to q's type, without turning a huge bias into -inf.
    s = torch.where(s == -math.inf, s, s.clamp(min=torch.finfo(dtype).min)).to(dtype)
    if mask is not None:
        visible = visible & mask
    if block_mask is not None:
        tiles = block_mask.repeat_interleave(BLOCK_MASK_TILE, dim=2)
        tiles = tiles.repeat_interleave(BLOCK_MASK_TILE, dim=3)
        visible = visible & tiles[:, :, :seqlen_q, :seqlen_k]
    s = s.masked_fill(~visible, -math.inf)
    seen = (s > -math.inf).detach()

    if sink is not None:
        s = torch.cat([s, sink[None, :, None, None].expand(batch, -1, seqlen_q, 1).to(s)], dim=-1)
    # A row without any finite score (nor sink) is empty: softmax must not see it.
    empty = ~(s > -math.inf).any(dim=-1)
    s = s.masked_fill(empty[..., None], 0.0)
    if s.shape[-1] == 0:
        lse = torch.full(s.shape[:-1], -math.inf, dtype=s.dtype, device=s.device)
    else:
        # torch.logsumexp's gradient, exp(s - lse), fails where lse cannot hold log(n) beside m.
        m = s.detach().amax(dim=-1)
        lse = m + torch.log(torch.exp(s - m[..., None]).sum(dim=-1))
        lse = lse.masked_fill(empty, -math.inf)
    p = torch.softmax(s, dim=-1).masked_fill(empty[..., None], 0.0)[..., :seqlen_k]
    if dropout_p > 0:
        kept = round(256 * (1 - dropout_p))
        p = p * dropout_mask * (256 / kept if kept else 0.0)
    out = p.to(v.dtype) @ v
    return out.transpose(1, 2), lse, seen


def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    seqused_q=None,
    seqused_k=None,
    key_bias=None,
    mask=None,
    block_mask=None,
    alibi_slopes=None,
    dropout_mask=None,
    **options,
):
    """`attention` for every sequence of a packed batch; rows that no sequence owns stay 0 / -inf.

    `mask`, `block_mask` and `dropout_mask` are indexed by positions inside each sequence.
    Returns out (total_q, Hq, Dv), lse (Hq, total_q), rows_seen (total_q, Hq), keys_seen
    (total_k, Hk).
    """
    total_q, heads_q, _ = q.shape
    total_k, heads_k, head_dim_v = v.shape
    out = q.new_zeros(total_q, heads_q, head_dim_v)
    lse = None
    rows_seen = torch.zeros(total_q, heads_q, dtype=torch.bool, device=q.device)
    keys_seen = torch.zeros(total_k, heads_k, dtype=torch.bool, device=q.device)

    def of_sequence(x, b, length_q, length_k):
        """Sequence b's part of a tensor that broadcasts to (B, Hq, max_q, max_k)."""
        if x is None:
            return None
        x = x[(None,) * (4 - x.dim())]
        x = x[b : b + 1] if x.shape[0] > 1 else x
        x = x[:, :, :length_q] if x.shape[2] > 1 else x
        return x[:, :, :, :length_k] if x.shape[3] > 1 else x

    for b in range(len(cu_seqlens_q) - 1):
        first_q, first_k = int(cu_seqlens_q[b]), int(cu_seqlens_k[b])
        length_q, length_k = int(cu_seqlens_q[b + 1]) - first_q, int(cu_seqlens_k[b + 1]) - first_k
        if seqused_q is not None:
            length_q = min(length_q, int(seqused_q[b]))
        if seqused_k is not None:
            length_k = min(length_k, int(seqused_k[b]))
        rows, keys = slice(first_q, first_q + length_q), slice(first_k, first_k + length_k)
        bias = None
        if key_bias is not None:
            bias = key_bias[..., None, keys]
        tiles = None
        if block_mask is not None:
            tiles = block_mask[b : b + 1] if block_mask.shape[0] > 1 else block_mask
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b : b + 1]
        o, part, seen = attention(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            bias=bias,
            mask=of_sequence(mask, b, length_q, length_k),
            block_mask=tiles,
            alibi_slopes=slopes,
            dropout_mask=of_sequence(dropout_mask, b, length_q, length_k),
            **options,
        )
        if lse is None:
            lse = torch.full((heads_q, total_q), -math.inf, dtype=part.dtype, device=q.device)
        out[rows] = o[0]
        lse[:, rows] = part[0]
        rows_seen[rows] = seen[0].any(dim=2).T
        groups = seen[0].any(dim=1).view(heads_k, heads_q // heads_k, length_k)
        keys_seen[keys] = groups.any(dim=1).T
    if lse is None:
        lse = torch.full((heads_q, total_q), -math.inf, dtype=q.dtype, device=q.device)
    return out, lse, rows_seen, keys_seen


def dlse_of_stored_out(exact_out, out, dout):
    """What the rounding of a stored `out` does to the backward, as a gradient of lse.

    out enters the backward through delta = rowsum(dout * out) alone, and dS = P * (dP - delta +
    dlse). Added to dlse, this makes `run` differentiate what the backward was given: the fp64
    gradient that belongs to the stored out (docs/accuracy.md says where that is the measure).
    """
    return ((exact_out - out.double()) * dout.double()).sum(-1).transpose(-1, -2)


def leaf(x, same_dtype):
    """A leaf copy that requires grad, in fp64 unless `same_dtype`."""
    x = x.detach().clone() if same_dtype else x.detach().double()
    return x.clone().requires_grad_()


def collect(out, lse, leaves, dout, dlse):
    """The result dict of `run`: out, lse and d<name> of every leaf that a gradient reaches."""
    result = {"out": out.detach(), "lse": lse.detach()}
    roots, seeds = [], []
    if dout is not None:
        roots, seeds = [out], [dout.to(out.dtype)]
    if dlse is not None and lse.requires_grad:  # without any key lse is a constant
        # lse is the constant -inf on empty rows: what arrives there reaches nothing.
        roots.append(lse)
        seeds.append(torch.where(lse.isinf(), torch.zeros_like(lse), dlse.to(lse.dtype)))
    if not roots:
        return result
    grads = torch.autograd.grad(roots, list(leaves.values()), seeds, allow_unused=True)
    for (name, x), grad in zip(leaves.items(), grads, strict=True):
        result["d" + name] = torch.zeros_like(x) if grad is None else grad
    return result


def run(q, k, v, dout=None, dlse=None, *, same_dtype=False, **options):
    """Forward and, when `dout` or `dlse` is given, backward of `attention`.

    Returns a dict: out, lse, dq, dk, dv, then dbias, dalibi_slopes, drel_bias, dsink for the tensor
    options given; and rows_seen (B, Sq, Hq), keys_seen (B, Sk, Hk), bool: who has a partner.
    """
    leaves = {name: leaf(x, same_dtype) for name, x in zip("qkv", (q, k, v), strict=True)}
    for name in GRAD_OPTIONS:
        if options.get(name) is not None:
            leaves[name] = leaf(options[name], same_dtype)
    inputs = {**options, **{name: x for name, x in leaves.items() if name not in "qkv"}}
    out, lse, seen = attention(leaves["q"], leaves["k"], leaves["v"], **inputs)
    result = collect(out, lse, leaves, dout, dlse)
    batch, seqlen_k, heads_k = k.shape[:3]
    result["rows_seen"] = seen.any(dim=3).transpose(1, 2)
    groups = seen.any(dim=2).view(batch, heads_k, -1, seqlen_k) if seen.numel() else None
    result["keys_seen"] = (
        groups.any(dim=2).transpose(1, 2)
        if groups is not None
        else torch.zeros(batch, seqlen_k, heads_k, dtype=torch.bool, device=q.device)
    )
    return result


def run_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, dout=None, dlse=None, *, same_dtype=False, **options
):
    """`run` for packed sequences; the key bias's gradient is `dkey_bias`."""
    leaves = {name: leaf(x, same_dtype) for name, x in zip("qkv", (q, k, v), strict=True)}
    for name in GRAD_OPTIONS:
        if options.get(name) is not None:
            leaves[name] = leaf(options[name], same_dtype)
    inputs = {**options, **{name: x for name, x in leaves.items() if name not in "qkv"}}
    out, lse, rows_seen, keys_seen = attention_varlen(
        leaves["q"], leaves["k"], leaves["v"], cu_seqlens_q, cu_seqlens_k, **inputs
    )
    result = (
        collect(out, lse, leaves, dout, dlse)
        if out.requires_grad
        else {
            "out": out,
            "lse": lse,
            **{"d" + name: torch.zeros_like(x) for name, x in leaves.items()},
        }
    )
    result["rows_seen"], result["keys_seen"] = rows_seen, keys_seen
    return result
