"""The DLite network is its formulas: recorded vectors, and a straight-line float64 reference written from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from dlite_agent.drafters import checkpoint, golden
from dlite_agent.drafters.dlite import AGENT_V1, DLiteConfig, DLiteDrafter, DLiteModel
from dlite_agent.drafters.pivot import pivot_layer_ids
from dlite_agent.drafters.protocol import DraftView
from dlite_agent.engine.target import Target
from dlite_agent.errors import ConfigError, DrafterFormatError
from dlite_agent.testing import random_dlite, tiny_target

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expected:
    hidden: Array  # [K, d]
    logits: Array  # [K, vocab]
    tokens: list[int]


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    mean_square: Array = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + epsilon) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rotated(x: Array, position: int, theta: float) -> Array:
    """RoPE of one head's vector: component i turns with component i + width / 2."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


class Reference:
    """One draft, one head and one slot at a time, from the formulas."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: DLiteConfig, embedding: torch.Tensor) -> None:
        self.weights: dict[str, Array] = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        self.config = config
        self.embedding: Array = embedding.double().numpy()
        ids = tensors.get("draft_to_target", torch.arange(config.vocab_size))
        self.draft_to_target: list[int] = ids.tolist()

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def project(self, x: Array, name: str) -> Array:
        out: Array = x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)
        return out

    def attention(self, block: Array, context: Array, layer: str) -> Array:
        config, width = self.config, self.config.head_dim
        slots = np.concatenate([context, block])
        positions = [0] * len(context) + list(range(len(block)))
        query, key, value = (
            self.project(x, f"{layer}.{p}_proj") for x, p in ((block, "q"), (slots, "k"), (slots, "v"))
        )
        mixed = np.zeros_like(query)
        for head in range(config.num_attention_heads):
            shared = head // (config.num_attention_heads // config.num_key_value_heads)
            at, shared_at = slice(head * width, (head + 1) * width), slice(shared * width, (shared + 1) * width)
            keys = self.norm(key[:, shared_at], f"{layer}.k_norm")
            keys = np.stack([rotated(k, p, config.rope_theta) for k, p in zip(keys, positions, strict=True)])
            for i, q in enumerate(self.norm(query[:, at], f"{layer}.q_norm")):
                scores = keys @ rotated(q, i, config.rope_theta) / np.sqrt(width)
                shares = np.exp(scores - scores.max())
                mixed[i, at] = shares / shares.sum() @ value[:, shared_at]
        return self.project(mixed, f"{layer}.o_proj")

    def hidden(self, pivot: Array, anchors: list[int]) -> Array:
        config = self.config
        depth = self.weights["layer_depth_embedding.weight"][list(config.target_layer_ids)]
        context = self.norm(pivot + depth, "context_norm")
        is_learned = "mask_embedding" in self.weights
        mask = self.weights["mask_embedding"] if is_learned else self.embedding[config.mask_token_id]
        block = np.concatenate([self.embedding[anchors], np.tile(mask, (config.num_drafts, 1))])
        for index in range(config.num_hidden_layers):
            layer = f"layers.{index}"
            block = block + self.attention(self.norm(block, f"{layer}.input_layernorm"), context, f"{layer}.self_attn")
            inner = self.norm(block, f"{layer}.post_attention_layernorm")
            gate = self.project(inner, f"{layer}.mlp.gate_proj")
            inner = gate * sigmoid(gate) * self.project(inner, f"{layer}.mlp.up_proj")
            block = block + self.project(inner, f"{layer}.mlp.down_proj")
        return self.norm(block, "norm")[-config.num_drafts :]

    def advanced(self, state: Array, token: int) -> Array:
        if self.config.version == "dlite_agent_v1":
            previous = self.project(self.embedding[token], "sequential_head.prev_token_proj")
        else:
            previous = self.weights["sequential_head.prev_token_embedding.weight"][token]
        both = self.project(np.concatenate([state, previous]), "sequential_head.state_proj")
        gate, candidate = both[: len(state)], both[len(state) :]
        return sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)

    def draft(self, pivot: Array, anchors: list[int], forced: list[int] | None = None) -> Expected:
        hidden = self.hidden(pivot, anchors)
        state: Array = np.zeros(self.config.sequential_rank)
        if len(anchors) == 2:
            state = self.advanced(state, anchors[0])
        previous, tokens, logits = anchors[-1], [], []
        for k in range(self.config.num_drafts):
            state = self.advanced(state, previous)
            fused = self.project(np.concatenate([state, hidden[k]]), "sequential_head.state_hidden_mlp")
            logits.append(self.weights["sequential_head.output_proj.weight"] @ fused)
            tokens.append(self.draft_to_target[int(logits[-1].argmax())])
            previous = tokens[-1] if forced is None else forced[k]
        return Expected(hidden, np.stack(logits), tokens)


def with_vocabulary(model: DLiteModel, *, seed: int = 0) -> DLiteModel:
    """Let a model of our version write some tokens here and there, not just the first ones."""
    if model.config.version == AGENT_V1:
        some = np.random.default_rng(seed).permutation(model.config.vocab_size)[: model.config.draft_vocab_size]
        model.draft_to_target.copy_(torch.from_numpy(np.sort(some)))
    return model


def agent_dlite(target: Target, **overrides: Any) -> DLiteModel:
    fields = {"version": AGENT_V1, "draft_vocab_size": 40, "has_confidence": True, "has_mask_embedding": True}
    return with_vocabulary(random_dlite(target, group=2, **{**fields, **overrides}))


def write_golden(folder: Path, model: DLiteModel, *, seed: int = 0) -> None:
    """Save a checkpoint and beside it the reference's outputs for random inputs."""
    config, rng = model.config, np.random.default_rng(seed)
    checkpoint.save(model, folder)
    embedding = torch.from_numpy(rng.normal(size=(config.vocab_size, config.hidden_size))).float()
    pivot = torch.from_numpy(rng.normal(size=(len(config.target_layer_ids), config.hidden_size))).float() * 3
    predecessor, anchor = rng.integers(0, config.vocab_size, size=2).tolist()
    forced = rng.integers(0, config.vocab_size, size=config.num_drafts).tolist()
    reference = Reference(load_file(folder / "model.safetensors"), config, embedding)
    anchors = [predecessor, anchor][-config.anchor_group_size :]
    greedy = reference.draft(pivot.double().numpy(), anchors)
    other = reference.draft(pivot.double().numpy(), anchors, forced)
    recorded = {
        "pivot_hidden": pivot.unsqueeze(0),
        "anchor_token": torch.tensor([anchor]),
        "predecessor_token": torch.tensor([predecessor]),
        "target_embedding": embedding,
        "draft_hidden": torch.from_numpy(greedy.hidden).float().unsqueeze(0),
        "forced_tokens": torch.tensor(forced),
        "forced_logits": torch.from_numpy(other.logits).float(),
        "greedy_logits": torch.from_numpy(greedy.logits).float(),
        "greedy_drafts": torch.tensor(greedy.tokens),
    }
    save_file(recorded, folder / "io.safetensors")


def changed_io(folder: Path, **changes: Any) -> None:
    """Rewrite a recording; a change is a function of the tensor, or None to leave it out."""
    recorded = load_file(folder / "io.safetensors")
    for name, change in changes.items():
        tensor = recorded.pop(name)
        if change is not None:
            recorded[name] = change(tensor)
    save_file(recorded, folder / "io.safetensors")


@pytest.fixture
def golden_folder(tmp_path: Path) -> Path:
    write_golden(tmp_path, random_dlite(tiny_target()))
    return tmp_path


@pytest.mark.parametrize("name", ["group1", "group2"])
def test_the_recorded_vectors_are_met(golden_vectors: Path, name: str) -> None:
    report = golden.check(golden_vectors / name)
    assert report.passed, report


@pytest.mark.parametrize("name", ["group1", "group2"])
def test_the_reference_here_meets_the_recorded_vectors_too(golden_vectors: Path, name: str) -> None:
    folder = golden_vectors / name
    recorded = load_file(folder / "io.safetensors")
    config = checkpoint.read_config(folder)
    reference = Reference(load_file(folder / "model.safetensors"), config, recorded["target_embedding"])
    anchors = [int(recorded["predecessor_token"]), int(recorded["anchor_token"])][-config.anchor_group_size :]
    pivot = recorded["pivot_hidden"][0].double().numpy()
    greedy = reference.draft(pivot, anchors)
    forced = reference.draft(pivot, anchors, recorded["forced_tokens"].tolist())
    assert np.abs(greedy.hidden - recorded["draft_hidden"][0].numpy()).max() < 1e-5
    assert np.abs(greedy.logits - recorded["greedy_logits"].numpy()).max() < 1e-5
    assert np.abs(forced.logits - recorded["forced_logits"].numpy()).max() < 1e-5
    assert greedy.tokens == recorded["greedy_drafts"].tolist()


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"group": 2},
        {"group": 2, "num_drafts": 1, "num_hidden_layers": 1},
        {"num_drafts": 12, "num_hidden_layers": 3, "rope_theta": 100.0},
        {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10},
        {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": True},
        {"group": 2, "rms_norm_eps": 0.1, "mask_token_id": 3, "sequential_rank": 5},
        {"version": AGENT_V1, "draft_vocab_size": 40},
        {"version": AGENT_V1, "draft_vocab_size": 160, "group": 2, "mask_token_id": 7},
        {"version": AGENT_V1, "draft_vocab_size": 40, "group": 2, "has_confidence": True, "has_mask_embedding": True},
    ],
    ids=str,
)
def test_random_checkpoints_compute_the_formulas(tmp_path: Path, overrides: dict[str, Any]) -> None:
    target = tiny_target("qwen3", num_hidden_layers=6)
    for seed in range(3):
        write_golden(tmp_path, with_vocabulary(random_dlite(target, seed=seed, **overrides), seed=seed), seed=seed)
        report = golden.check(tmp_path)
        assert report.passed, report
        assert report.hidden_error < 1e-5


def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_hidden": double},
        {"forced_logits": double},
        {"greedy_logits": double},
        {"pivot_hidden": double},
        {"target_embedding": double},
        {"greedy_drafts": lambda tokens: (tokens + 1) % 160},
        {"forced_tokens": lambda tokens: (tokens + 1) % 160},
        {"anchor_token": lambda tokens: (tokens + 1) % 160},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_recording_that_is_not_met_is_noticed(golden_folder: Path, changes: dict[str, Any]) -> None:
    assert golden.check(golden_folder).passed
    changed_io(golden_folder, **changes)
    assert not golden.check(golden_folder).passed


def test_a_recording_that_cannot_be_compared_is_an_error(golden_folder: Path) -> None:
    changed_io(golden_folder, greedy_logits=lambda logits: logits[:, :-1].contiguous())
    with pytest.raises(DrafterFormatError, match="shape"):
        golden.check(golden_folder)
    changed_io(golden_folder, greedy_logits=None)
    with pytest.raises(DrafterFormatError, match="greedy_logits"):
        golden.check(golden_folder)
    (golden_folder / "io.safetensors").write_bytes(b"{")
    with pytest.raises(DrafterFormatError, match=r"io\.safetensors"):
        golden.check(golden_folder)


def view_of(ids: list[int], target: Target, *, max_tokens: int = 7, drafted: tuple[int, ...] = ()) -> DraftView:
    pivot = target.forward([1, 2, 3], target.new_cache()).features[-1]
    return DraftView(np.array(ids, dtype=np.int32), drafted, pivot, max_tokens)


@pytest.mark.parametrize("group", [1, 2])
def test_what_came_before_the_anchors_and_where_they_stand_changes_nothing(llama: Target, group: int) -> None:
    drafter = DLiteDrafter(random_dlite(llama, group=group), llama.embedding)
    expected = list(drafter.propose([view_of([8, 9], llama)])[0].tokens)
    assert len(expected) == 7
    for length in (1, 2, 300, 100_000):
        for seed in (0, 1):
            before = np.random.default_rng(seed).integers(0, 160, size=length).tolist()
            assert list(drafter.propose([view_of([*before, 8, 9], llama)])[0].tokens) == expected


@pytest.mark.parametrize("group", [1, 2])
def test_pivot_and_anchors_each_change_the_logits(llama: Target, group: int) -> None:
    model, generator = random_dlite(llama, group=group), torch.Generator().manual_seed(0)
    pivot = torch.randn(1, len(llama.layer_ids), llama.hidden_size, generator=generator)
    anchors = torch.tensor([[8, 9]])

    def logits(pivot: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return model.greedy(pivot, anchors[:, -group:], llama.embedding, num_tokens=1)[1]

    with torch.inference_mode():
        expected = logits(pivot, anchors)
        assert not torch.allclose(logits(pivot, torch.tensor([[8, 10]])), expected)
        assert torch.equal(logits(pivot, torch.tensor([[7, 9]])), expected) == (group == 1)
        for slot in range(pivot.shape[1]):
            other = pivot.clone()
            other[0, slot] += 1
            assert not torch.allclose(logits(other, anchors), expected)
        swapped = pivot.clone()
        swapped[0, [0, 1]] = pivot[0, [1, 0]]  # the layer's depth embedding tells them apart
        assert not torch.allclose(logits(swapped, anchors), expected)


def test_a_batch_is_drafted_as_its_rows_are(llama: Target) -> None:
    model, generator = random_dlite(llama, group=2), torch.Generator().manual_seed(0)
    pivot = torch.randn(3, len(llama.layer_ids), llama.hidden_size, generator=generator)
    anchors = torch.tensor([[1, 2], [3, 4], [2, 1]])
    with torch.inference_mode():
        tokens, logits = model.greedy(pivot, anchors, llama.embedding, num_tokens=7)
        for row in range(3):
            one, one_logits = model.greedy(pivot[[row]], anchors[[row]], llama.embedding, num_tokens=7)
            assert torch.equal(tokens[[row]], one)
            assert torch.allclose(logits[[row]], one_logits, atol=1e-5)
        forced = model.forced(model.hidden(pivot, anchors, llama.embedding), anchors, tokens, llama.embedding)
        assert torch.allclose(forced, logits, atol=1e-6)


def test_a_shorter_draft_is_the_beginning_of_a_longer_one(llama: Target) -> None:
    drafter = DLiteDrafter(random_dlite(llama, group=2), llama.embedding)
    whole = list(drafter.propose([view_of([4, 8, 9], llama, max_tokens=50)])[0].tokens)
    assert len(whole) == 7  # K, however much is asked for
    for length in range(1, 7):
        assert list(drafter.propose([view_of([4, 8, 9], llama, max_tokens=length)])[0].tokens) == whole[:length]


def test_nothing_is_drafted_without_room_pivot_or_anchors(llama: Target) -> None:
    drafter = DLiteDrafter(random_dlite(llama, group=2), llama.embedding)
    assert list(drafter.propose([view_of([4, 8], llama, drafted=(5,) * 7)])[0].tokens) == []
    assert list(drafter.propose([view_of([4, 8], llama, max_tokens=0)])[0].tokens) == []
    assert list(drafter.propose([view_of([8], llama)])[0].tokens) == []
    without = DraftView(np.array([4, 8], dtype=np.int32), (), None, 7)
    assert list(drafter.propose([without])[0].tokens) == []


@pytest.mark.parametrize("make", [partial(random_dlite, group=2), agent_dlite], ids=["dlite_v1", "dlite_agent_v1"])
def test_a_draft_goes_on_behind_tokens_that_stand_already(llama: Target, make: Callable[[Target], DLiteModel]) -> None:
    model = make(llama)
    drafter = DLiteDrafter(model, llama.embedding)
    (whole,) = drafter.propose([view_of([4, 8], llama)])
    for count in (1, 3, 6):
        own = tuple(whole.tokens[:count])
        (rest,) = drafter.propose([view_of([4, 8], llama, drafted=own)])
        assert list(rest.tokens) == list(whole.tokens[count:])
        assert list(rest.confidence) == pytest.approx(list(whole.confidence[count:]), abs=1e-6)
    forced, pivot = [150, 3, 150], view_of([4, 8], llama).pivot
    assert pivot is not None
    (behind,) = drafter.propose([view_of([4, 8], llama, drafted=tuple(forced), max_tokens=2)])
    anchors, tokens = torch.tensor([[4, 8]]), [*forced]
    hidden = model.hidden(pivot.unsqueeze(0), anchors, llama.embedding)
    for _ in range(2):
        padded = torch.tensor([[*tokens, 0]])
        tokens.append(int(model.likeliest(0, model.forced(hidden, anchors, padded, llama.embedding)[:, -1])))
    assert list(behind.tokens) == tokens[3:]
    states = model.states(anchors, torch.tensor([tokens]), llama.embedding)
    if model.config.has_confidence:
        sure = torch.sigmoid(model.sequential_head.confidence_logits(states, hidden[:, :5]))
    else:
        sure = torch.softmax(model.sequential_head.logits(states, hidden[:, :5]), dim=-1).amax(dim=-1)
    assert list(behind.confidence) == pytest.approx(sure[0, 3:].tolist(), abs=1e-5)
    assert list(behind.confidence) != pytest.approx(list(whole.confidence[3:5]), abs=1e-4)


def test_our_version_writes_its_vocabulary_and_says_how_sure_it_is(llama: Target) -> None:
    model = agent_dlite(llama)
    drafter = DLiteDrafter(model, llama.embedding)
    pivots = [llama.forward([n, 2, 3], llama.new_cache()).features[-1] for n in range(20)]
    views = [replace(view_of([5, 9 + n], llama), pivot=pivot) for n, pivot in enumerate(pivots)]
    proposals = drafter.propose(views)
    written = {token for proposal in proposals for token in proposal.tokens}
    assert len(written) > 3
    assert written <= set(model.draft_to_target.tolist())
    assert max(written) >= 40
    head = model.sequential_head
    for view, proposal in zip(views, proposals, strict=True):
        anchors, tokens = torch.tensor([[5, int(view.ids[-1])]]), torch.tensor([list(proposal.tokens)])
        assert view.pivot is not None
        hidden, states = (
            model.hidden(view.pivot[None], anchors, llama.embedding),
            model.states(anchors, tokens, llama.embedding),
        )
        weight, bias = head.confidence_proj.weight[0], head.confidence_proj.bias
        expected = torch.sigmoid(hidden[0] @ weight[:32] + states[0] @ weight[32:] + bias)
        assert list(proposal.confidence) == pytest.approx(expected.tolist(), abs=1e-5)


def test_without_a_confidence_head_it_is_the_probability_of_the_token(llama: Target) -> None:
    for model in (random_dlite(llama, group=2), agent_dlite(llama, has_confidence=False)):
        view = view_of([4, 8], llama)
        (proposal,) = DLiteDrafter(model, llama.embedding).propose([view])
        assert view.pivot is not None
        anchors, tokens = torch.tensor([[4, 8]]), torch.tensor([list(proposal.tokens)])
        hidden = model.hidden(view.pivot[None], anchors, llama.embedding)
        likely = torch.softmax(model.forced(hidden, anchors, tokens, llama.embedding), dim=-1).amax(dim=-1)
        assert list(proposal.confidence) == pytest.approx(likely[0].tolist(), abs=1e-5)


def test_a_view_that_draws_sees_only_what_the_head_can_write(llama: Target) -> None:
    model = agent_dlite(llama)
    seen: list[torch.Tensor] = []

    def draw(logits: torch.Tensor, k: int) -> tuple[int, torch.Tensor | None]:
        assert k == len(seen)  # counted from where the proposal begins
        seen.append(logits.clone())
        return int(logits.argmax()), torch.softmax(logits, dim=-1)

    view = view_of([4, 8], llama, drafted=(5, 6))
    (plain,) = DLiteDrafter(model, llama.embedding).propose([view])
    (drawn,) = DLiteDrafter(model, llama.embedding).propose([replace(view, draw=draw)])
    assert list(drawn.tokens) == list(plain.tokens)
    assert len(seen) == len(drawn.distributions) == 5
    assert all(q.shape == (llama.vocab_size,) for q in drawn.distributions)
    for logits in seen:
        assert logits.isfinite().nonzero().flatten().tolist() == model.draft_to_target.tolist()


def test_training_after_drafting_is_possible(llama: Target) -> None:
    model = agent_dlite(llama)
    DLiteDrafter(model, llama.embedding).propose([view_of([4, 8], llama)])
    model.requires_grad_(True)
    pivot = view_of([4, 8], llama).pivot
    assert pivot is not None
    roll = model.roll(
        pivot[None].clone(), torch.tensor([[4, 8]]), llama.embedding, num_tokens=3, choose=model.likeliest
    )
    head = model.sequential_head
    (roll.logits.sum() + head.confidence_logits(roll.states, roll.hidden).sum()).backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_views_drafted_together_get_what_each_gets_alone(llama: Target) -> None:
    drafter = DLiteDrafter(random_dlite(llama, group=2), llama.embedding)
    views = [
        view_of([4, 8, 9], llama, max_tokens=3),
        view_of([4, 8], llama, drafted=(5,)),
        view_of([1, 2, 3], llama, max_tokens=7),
        view_of([7], llama),
    ]
    together = drafter.propose(views)
    assert [list(p.tokens) for p in together] == [list(drafter.propose([view])[0].tokens) for view in views]
    assert [len(p.tokens) for p in together] == [3, 6, 7, 0]
    assert all(len(p.confidence) == len(p.tokens) for p in together)


def test_a_view_may_say_how_tokens_are_drawn(llama: Target) -> None:
    drafter = DLiteDrafter(random_dlite(llama, group=1), llama.embedding)
    q = torch.full((llama.vocab_size,), 1 / llama.vocab_size)
    drawn = replace(view_of([4, 8], llama), draw=lambda logits, k: (10 + k, q))
    plain = view_of([4, 8], llama)
    first, second = drafter.propose([drawn, plain])
    assert list(first.tokens) == [10, 11, 12, 13, 14, 15, 16]
    assert len(first.distributions) == 7
    assert list(second.tokens) == list(drafter.propose([plain])[0].tokens)
    assert list(second.distributions) == []


@pytest.mark.parametrize(
    "field",
    [
        ("anchor_group_size", 3),
        ("anchor_group_size", 0),
        ("block_size", 1),
        ("mask_token_id", 160),
        ("mask_token_id", -1),
        ("head_dim", 15),
        ("num_key_value_heads", 0),
        ("hidden_size", 0),
        ("sequential_rank", 0),
        ("num_hidden_layers", 0),
        ("draft_vocab_size", 5),
    ],
)
def test_a_shape_that_cannot_work_is_refused(llama: Target, field: tuple[str, int]) -> None:
    name, value = field
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        random_dlite(llama, **{name: value})


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"version": "dlite_v2"}, "version is 'dlite_v2'"),
        ({"version": AGENT_V1}, "draft_vocab_size is 0"),
        ({"version": AGENT_V1, "draft_vocab_size": 161}, "draft_vocab_size is 161"),
        ({"has_confidence": True}, "confidence head"),
        ({"has_mask_embedding": True}, "learned mask"),
    ],
)
def test_a_version_with_what_it_does_not_have_is_refused(llama: Target, overrides: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        random_dlite(llama, **overrides)


def test_a_drafter_for_the_published_shape_reads_the_published_layers() -> None:
    assert checkpoint.VERSION == "dlite_v1"
    assert pivot_layer_ids(36, 7) == (0, 1, 9, 17, 26, 34, 35)
