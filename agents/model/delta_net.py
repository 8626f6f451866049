"""Gated DeltaNet (arXiv 2412.06464), the state layer of Qwen3.5, over packed sequences: exact, and without leaks.

A state layer carries two things from token to token: the last inputs of a short convolution, and a matrix per head. In
a packed row both must begin anew with each sequence, or continue from the prefix that several sequences share.
`StatePlan` says where sequences begin, and `install` puts `delta_net_forward` in place of Transformers' own forward.

The rule is S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - exp(g_t) k_t S_{t-1}), with the output q_t S_t. Chunks of 64
tokens are computed all at once, up to their effect on the state; a scan then takes the state through the chunks of each
sequence, for all sequences at once. It is written in torch, in float32 inside, as the reference.

Legend: T packed tokens, S sequences, N chunks of all sequences, P tokens of a chunk, E inputs of a chunk's convolution,
B rows of a decode step, H heads (or hidden size, beside T alone), K and V key and value size, C channels, W the
convolution's inputs before a token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from agents.model.state_plan import CHUNK, WIDTH, StatePlan


@dataclass(frozen=True, eq=False)
class States:
    """What a state layer carries on, for each sequence: `conv_SCW` in the network's dtype, the rest in float32.

    Example: Qwen3.5-2B has 6,144 channels and 16 heads of 128 x 128, so (S, 6144, 3) and (S, 16, 128, 128).
    """

    conv_SCW: Tensor
    recurrent_SHKV: Tensor

    @classmethod
    def zeros(cls, module: Any, count: int, like: Tensor) -> States:
        """Return the states of `count` sequences without tokens; `like` gives device and dtype."""
        recurrent = (count, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        return cls(
            conv_SCW=like.new_zeros(count, module.conv_dim, WIDTH),
            recurrent_SHKV=like.new_zeros(recurrent, dtype=torch.float32),
        )


class StateCache(Protocol):
    """The cache of an engine, as a state layer uses it."""

    def state_forward(self, module: nn.Module, hidden_BTH: Tensor) -> Tensor:
        """Return the layer's output (B, T, H), and keep the states after these tokens."""
        ...


def install(decoder: nn.Module) -> None:
    """Let the state layers of a decoder compute with `delta_net_forward`, whatever the release of Transformers."""
    for module in decoder.modules():
        if hasattr(module, "linear_attn"):
            layer: Any = module.linear_attn
            layer.forward = functools.partial(_layer_forward, layer)


def _layer_forward(
    module: nn.Module,
    hidden_states: Tensor,
    cache: StateCache | None = None,
    cache_params: StateCache | None = None,
    state_plan: StatePlan | None = None,
    **_: Any,
) -> Tensor:
    """Return the output of a state layer, (B, T, H).

    An engine's cache, named "cache_params" before Transformers 5.18, has the states before these tokens. Without one
    `state_plan` says where sequences begin in all rows, one behind the other.
    """
    if cache is None:
        cache = cache_params
    if cache is not None:
        return cache.state_forward(module, hidden_states)
    assert state_plan is not None, "a network with states needs to know where its sequences begin"
    out_1TH, _states = delta_net_forward(module, hidden_states.flatten(0, 1)[None], state_plan)
    return out_1TH.view(hidden_states.shape)


def delta_net_forward(
    module: Any, hidden_1TH: Tensor, plan: StatePlan, states: States | None = None
) -> tuple[Tensor, States]:
    """Return the output of a state layer for a packed row, and each sequence's states after its tokens.

    `states` are those before the tokens, one row a sequence, None for zeros; a sequence with a prefix ignores its own.
    """
    hidden_TH = hidden_1TH[0]
    if states is None:
        states = States.zeros(module, len(plan.last_inputs_SW), hidden_TH)
    inputs = (module.conv1d.weight, module.in_proj_qkv(hidden_TH), *_gates(module, hidden_TH))
    mix: Any = _mix  # torch types what it leaves uncompiled as a decorator
    out_THV, conv_SCW, recurrent_SHKV = mix(module, *inputs, plan, states)
    return _output(module, hidden_TH, out_THV)[None], States(conv_SCW, recurrent_SHKV)


def delta_net_step(module: Any, hidden_B1H: Tensor, states: States, alive_B: Tensor) -> tuple[Tensor, States]:
    """Return the output for one token a row, and the states after it; rows that are not alive keep theirs."""
    hidden_BH = hidden_B1H[:, 0]
    inputs_BEC = torch.cat([states.conv_SCW.transpose(1, 2), module.in_proj_qkv(hidden_BH)[:, None]], dim=1)
    query, key, value = (x[:, 0] for x in _heads(module, _convolve(module.conv1d.weight, inputs_BEC)))
    decay_BH, beta_BH = _gates(module, hidden_BH)
    recurrent_BHKV = states.recurrent_SHKV * decay_BH.exp()[..., None, None]
    known_BHV = (recurrent_BHKV * key[..., None]).sum(-2)
    change_BHV = (value - known_BHV) * beta_BH[..., None]
    recurrent_BHKV = recurrent_BHKV + key[..., None] * change_BHV[..., None, :]
    out_BHV = (recurrent_BHKV * query[..., None]).sum(-2)
    after = States(
        conv_SCW=torch.where(alive_B[:, None, None], inputs_BEC[:, 1:].transpose(1, 2), states.conv_SCW),
        recurrent_SHKV=torch.where(alive_B[:, None, None, None], recurrent_BHKV, states.recurrent_SHKV),
    )
    return _output(module, hidden_BH, out_BHV)[:, None], after


def _convolve(weight_C1E: Tensor, inputs_NEC: Tensor) -> Tensor:
    """Return the convolution of (N, W + P, C) inputs at their last P places, with its activation."""
    weight_CE = weight_C1E[:, 0].float()
    length = inputs_NEC.shape[1] - WIDTH
    mixed_NPC = inputs_NEC[:, :length] * weight_CE[:, 0]
    for place in range(1, WIDTH + 1):
        mixed_NPC = mixed_NPC + inputs_NEC[:, place : place + length] * weight_CE[:, place]
    return F.silu(mixed_NPC.to(inputs_NEC.dtype))


def _heads(module: Any, mixed_NPC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed queries and keys, and values, in float32: (N, P, H, K) and (N, P, H, V)."""
    query, key, value = mixed_NPC.float().split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    query, key = (x.unflatten(-1, (-1, module.head_k_dim)) for x in (query, key))
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    groups = module.num_v_heads // module.num_k_heads
    query, key = (x.repeat_interleave(groups, dim=-2) for x in (query, key))
    return query * module.head_k_dim**-0.5, key, value.unflatten(-1, (-1, module.head_v_dim))


def _gates(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay, and the strength of each token's change: (..., H) in float32."""
    rate = F.softplus(module.in_proj_a(hidden).float() + module.dt_bias)
    return -module.A_log.float().exp() * rate, module.in_proj_b(hidden).sigmoid().float()


def _output(module: Any, hidden: Tensor, out_HV: Tensor) -> Tensor:
    """Return the layer's output from what its heads read; tokens come first in all shapes."""
    gate = module.in_proj_z(hidden).reshape(-1, module.head_v_dim)
    normed = module.norm(out_HV.to(hidden.dtype).reshape(-1, module.head_v_dim), gate)
    return module.out_proj(normed.view(len(hidden), -1))


# The scan's loop has another length for every row, so the part that holds it is not compiled as a whole.
@torch.compiler.disable
def _mix(module: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the heads of each token read, (T, H, V), and the states after each sequence.

    The inputs within a chunk are many times as large as the layer's own, so a backward pass computes them again.
    """
    if torch.is_grad_enabled():
        return checkpoint(_mix_once, module, *inputs, use_reentrant=False, preserve_rng_state=False)
    return _mix_once(module, *inputs)


def _mix_once(
    module: Any,
    weight_C1E: Tensor,
    mixed_TC: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    plan: StatePlan,
    states: States,
) -> tuple[Tensor, Tensor, Tensor]:
    inside = _inside_chunks
    across = _read
    if plan.is_compiled:
        inside = _compiled(inside)
        across = _compiled(across)
    inputs_XC = torch.cat([mixed_TC, states.conv_SCW.transpose(1, 2).flatten(0, 1).to(mixed_TC.dtype)])
    chunk = inside(module, weight_C1E, inputs_XC, decay_TH, beta_TH, plan.inputs_NE, plan.is_token_NP)
    changes, before, after_SHKV = _scan(chunk, plan, states.recurrent_SHKV)
    out_THV = across(chunk, before, changes, plan.chunk_row_T).to(mixed_TC.dtype)
    return out_THV, _rows(inputs_XC, plan.last_inputs_SW).transpose(1, 2), after_SHKV


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)


class Chunks(NamedTuple):
    """What chunks say without the state before them, each (N, H, ...).

    The changes of their tokens are `value - known @ state`; `key_left` writes them into the state after the chunk,
    which keeps `kept` of itself. Its tokens read `query @ state + seen @ changes`.
    """

    value: Tensor
    known: Tensor
    key_left: Tensor
    kept: Tensor
    query: Tensor
    seen: Tensor


def _inside_chunks(
    module: Any,
    weight_C1E: Tensor,
    inputs_XC: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    inputs_NE: Tensor,
    is_token_NP: Tensor,
) -> Chunks:
    query, key, value = (x.transpose(1, 2) for x in _heads(module, _convolve(weight_C1E, _rows(inputs_XC, inputs_NE))))
    # Zeros for padding: it neither changes the state nor lets it decay.
    tokens_NP = inputs_NE[:, WIDTH:].clamp(max=len(decay_TH) - 1)
    decay_NHP = (_rows(decay_TH, tokens_NP) * is_token_NP[..., None]).transpose(1, 2)
    beta_NHP1 = (_rows(beta_TH, tokens_NP) * is_token_NP[..., None]).transpose(1, 2)[..., None]
    decay_NHP = decay_NHP.cumsum(-1)  # from the chunk's beginning to each token
    between_NHPP = decay_NHP[..., :, None] - decay_NHP[..., None, :]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay_TH.device).triu(1)
    between_NHPP = between_NHPP.masked_fill(later, -torch.inf).exp()
    # Each token's change corrects what the changes of the earlier ones already say: a triangular system.
    system = ((key * beta_NHP1) @ key.mT) * between_NHPP
    right = torch.cat([value, key * decay_NHP[..., None].exp()], dim=-1) * beta_NHP1
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    value, known = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    return Chunks(
        value=value,
        known=known,
        key_left=key * (decay_NHP[..., -1:] - decay_NHP)[..., None].exp(),
        kept=decay_NHP[..., -1].exp(),
        query=query * decay_NHP[..., None].exp(),
        seen=(query @ key.mT) * between_NHPP,
    )


def _rows(x: Tensor, places: Tensor) -> Tensor:
    """Return the rows of `x` at places of any shape; unlike that of plain indexing, the gradient repeats to the bit."""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape)


def _read(chunk: Chunks, before: Tensor, changes: Tensor, chunk_row_T: Tensor) -> Tensor:
    """Return what the tokens read, (T, H, V), from the states before their chunks and the changes within."""
    read = chunk.query @ before + chunk.seen @ changes
    return read.transpose(1, 2).flatten(0, 1).index_select(0, chunk_row_T)


def _scan(chunk: Chunks, plan: StatePlan, first_SHKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take the states through all chunks, in as many steps as the longest sequence of each generation has chunks.

    Returns each chunk's changes (N, H, P, V), the state before each chunk (N, H, K, V), and the state after each
    sequence.
    """
    sizes = [sum(generation.counts) for generation in plan.generations]
    inputs = (chunk.value, chunk.known, chunk.key_left, chunk.kept)
    parts = zip(*(torch.split(x, sizes) for x in inputs), strict=True)
    results: list[tuple[Tensor, Tensor]] = []
    after_SHKV = first_SHKV
    for generation, part in zip(plan.generations, parts, strict=True):
        state = after_SHKV.index_select(0, generation.sources)
        changes, before, finals = _Scan.apply(*part, state, generation.counts)
        results.append((changes, before))
        if generation is plan.generations[0]:
            after_SHKV = finals
        else:
            after_SHKV = torch.cat([after_SHKV, finals])
    changes, before = (torch.cat(each) for each in zip(*results, strict=True))
    return changes, before, after_SHKV.index_select(0, plan.order_S)


class _Scan(torch.autograd.Function):
    """Takes states through the chunks of one generation, one step a chunk.

    The steps are short, so that starting kernels costs more than they do: autograd would start four times as many.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, known: Tensor, key_left: Tensor, kept: Tensor, state: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the changes and the state before each chunk, and the states at the ends, longest sequence first."""
        before: list[Tensor] = []
        changes: list[Tensor] = []
        ended: list[Tensor] = []
        steps = zip(*(torch.split(x, counts) for x in (value, known, key_left.mT, kept[..., None, None])), strict=True)
        for count, (own_value, own_known, own_key, own_kept) in zip(counts, steps, strict=True):
            ended.append(state[count:])
            state = state[:count]
            change = _add_product(own_value, own_known, state, -1)
            before.append(state)
            changes.append(change)
            state = _add_product(state * own_kept, own_key, change, 1)
        results = torch.cat(changes), torch.cat(before)
        ctx.save_for_backward(known, key_left, kept, *results)
        ctx.counts = counts
        return *results, torch.cat([state, *reversed(ended)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of all inputs, by the same steps in reverse."""
        known, key_left, kept, changes, before = ctx.saved_tensors
        of_changes, of_before, of_ends = grads
        tensors = (known.mT, key_left, kept[..., None, None], of_changes, of_before)
        steps = zip(*(reversed(torch.split(x, ctx.counts)) for x in tensors), strict=True)
        of_value: list[Tensor] = []
        of_after: list[Tensor] = []
        of_state = of_ends[:0]
        for count, (own_known, own_key, own_kept, of_change, of_own) in zip(reversed(ctx.counts), steps, strict=True):
            # Sequences that end with this chunk join those that go on.
            of_state = torch.cat([of_state, of_ends[len(of_state) : count]])
            of_change = _add_product(of_change, own_key, of_state, 1)
            of_value.append(of_change)
            of_after.append(of_state)
            of_state = _add_product(of_own.addcmul(of_state, own_kept), own_known, of_change, -1)
        changed = torch.cat(of_value[::-1])
        after = torch.cat(of_after[::-1])
        first = torch.cat([of_state, of_ends[len(of_state) :]])
        return changed, -changed @ before.mT, changes @ after.mT, (after * before).sum((-1, -2)), first, None


def _add_product(base: Tensor, left: Tensor, right: Tensor, sign: int) -> Tensor:
    """Return base + sign * left @ right for (n, H, ...) matrices, in one kernel."""
    flat = (x.flatten(0, 1) for x in (base, left, right))
    return torch.baddbmm(*flat, alpha=sign).view(base.shape)
