"""The engine's figures: against transformers' `generate`, by rows, by context, for many sessions, in memory.

Every figure is a ratio of things measured alternately in one process on the same weights (the memory of a prefill has a
process of its own). Where several models are measured, a figure is that of the model it is worst for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlite_agent import runtime as runtimes
from dlite_agent.bench import memory, passes, peers
from dlite_agent.bench.contest import Contender, OurSide, Results, Run, Spread, contest, tap
from dlite_agent.bench.exact import Comparison, Mismatch, first_difference, sampling_modes
from dlite_agent.bench.prompts import RecordedPrompt, choose, recorded_sessions, session_prompts
from dlite_agent.config import Settings
from dlite_agent.drafters.loading import load_drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.draft_length import AdaptiveLength, PassCost
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.target import Quantization, Target
from dlite_agent.errors import ConfigError
from dlite_agent.models import progress_bars, resolve
from dlite_agent.recorded import RecordedSession

if TYPE_CHECKING:
    from dlite_agent.runtime import Runtime

DEFAULT_MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b")
PLAIN = "ours plain"
LOOKUP = "ours lookup"
INT8_PLAIN = "ours int8 plain"
INT8_LOOKUP = "ours int8 lookup"
_INT8_MODEL = "qwen2.5-coder-0.5b"  # of several models, the one whose int8 figure counts


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to be: at most `value`, or at least."""

    value: float
    is_ceiling: bool

    def holds(self, figure: float) -> bool:
        """Whether a figure is good enough."""
        return figure <= self.value if self.is_ceiling else figure >= self.value

    def judged(self, figure: float) -> tuple[str, str]:
        """Return the bar as people write it, and whether a figure holds."""
        return f"{'<=' if self.is_ceiling else '>='} {self.value:g}", "holds" if self.holds(figure) else "missed"

    def worst(self, spreads: Iterable[Spread]) -> Spread:
        """Return the spread whose median is furthest on the wrong side."""
        pick = max if self.is_ceiling else min
        return pick(spreads, key=lambda spread: spread.median)


BARS = {
    "verify4_over_plain1": Bar(1.35, is_ceiling=True),
    "plain_over_hf": Bar(1.15, is_ceiling=False),
    "spec_over_hf": Bar(2.0, is_ceiling=False),
    "spec_over_hf_lookup": Bar(1.4, is_ceiling=False),
    "int8_over_fp32": Bar(2.0, is_ceiling=False),
    "concurrent8_over_1": Bar(2.5, is_ceiling=False),
    "step_8k_over_512": Bar(1.1, is_ceiling=True),
    "prefill_extra_mb": Bar(300.0, is_ceiling=True),
    "mismatches": Bar(0.0, is_ceiling=True),
}
_AGAINST_PEERS = ("plain_over_hf", "spec_over_hf", "spec_over_hf_lookup")
_FROM_A_CONTEST = (*_AGAINST_PEERS, "int8_over_fp32", "mismatches")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to measure, and how long.

    Attributes:
        models: Registry names, folders or hub ids.
        has_peers: Measure transformers too.
        drafters: Drafters besides lookup (see `load_drafter`).
        assistant: A small model of the same vocabulary for transformers' assisted mode, or None.
        workloads: Recorded sessions; None for the excerpt that comes with the package.
        subset: A list of ids among them.
        num_prompts: Tool-call prompts to decode; half as many prose prompts are.
        max_prompt: Longest prompt taken.
        max_tokens: Upper bound of tokens per reply.
        num_rounds: How often everything is repeated.
        num_concurrent_tokens: Tokens of each of the concurrent sessions.
        num_concurrent_rows: Prompt length of each of them.
        is_whole_prefill: Compute all rows of the long prefill, or just the last ones, where its peak is.
        only: Figures wanted; empty for all.
        seed: Names the sampling noise.
    """

    models: Sequence[str] = DEFAULT_MODELS
    has_peers: bool = False
    drafters: Sequence[str] = ()
    assistant: str | None = None
    workloads: Path | None = None
    subset: str | None = None
    num_prompts: int = 12
    max_prompt: int = 8000
    max_tokens: int = 64
    num_rounds: int = 3
    num_concurrent_tokens: int = 32
    num_concurrent_rows: int = 512
    is_whole_prefill: bool = True
    only: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.only) - BARS.keys()):
            raise ConfigError(f"no figure {unknown[0]!r}; expected {', '.join(BARS)}")
        if self.max_tokens < 2:
            raise ConfigError(f"max_tokens is {self.max_tokens}; expected at least 2, since the first is prefill's")
        if missing := sorted(set(self.only).intersection(_AGAINST_PEERS)) if not self.has_peers else []:
            raise ConfigError(f"{missing[0]} compares with transformers; add --peers")

    def wants(self, *figures: str) -> bool:
        """Whether one of these figures is wanted."""
        return not self.only or not set(self.only).isdisjoint(figures)


QUICK = EngineOptions(
    num_prompts=3,
    max_prompt=1600,
    max_tokens=32,
    num_rounds=2,
    num_concurrent_tokens=12,
    num_concurrent_rows=128,
    is_whole_prefill=False,
)
_QUICK_PREFILL_ROWS = 1024


@dataclass(slots=True)
class ModelReport:
    """What one model gave.

    Attributes:
        figures: Spreads by figure.
        rates: Each contender's rates, for JSON.
        mismatches: Speculative texts that are not the plain one.
        int8_mismatches: Those of the target with int8 weights, greedy.
        differences: Plain texts of transformers that are not ours; both are right up to rounding.
        sizes: Rows and tokens behind the figures.
    """

    figures: dict[str, Spread] = field(default_factory=dict)
    rates: dict[str, dict[str, Any]] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    int8_mismatches: list[Mismatch] = field(default_factory=list)
    differences: list[Mismatch] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)


def measure(
    options: EngineOptions, *, settings: Settings, say: Callable[[str], None] = lambda text: None
) -> dict[str, ModelReport]:
    """Measure every model, one after the other; `say` is told what is being done."""
    sessions = recorded_sessions(options.workloads, subset=options.subset)
    reports = {}
    for model in options.models:
        try:
            bench = _Bench(_load(model, None, settings), options, settings, say=say)
            reports[model] = bench.measure(sessions)
        finally:
            runtimes.close_all()
            gc.collect()
    return reports


def headline(reports: dict[str, ModelReport]) -> dict[str, Spread]:
    """Return each figure of the model it is worst for; mismatches of all together."""
    figures = {}
    for key, bar in BARS.items():
        by_model = {model: report.figures[key] for model, report in reports.items() if key in report.figures}
        if key == "int8_over_fp32" and _INT8_MODEL in by_model:
            by_model = {_INT8_MODEL: by_model[_INT8_MODEL]}
        if key == "mismatches" and by_model:
            total = sum(spread.median for spread in by_model.values())
            figures[key] = Spread(total, total, total)
        elif by_model:
            figures[key] = bar.worst(by_model.values())
    return figures


def _load(model: str, quantize: Quantization | None, settings: Settings) -> Runtime:
    """Load a model as the product does."""
    return runtimes.shared_runtime(model, drafter="null", quantize=quantize, store=None, settings=settings)


class _Bench:
    """The figures of one model."""

    def __init__(
        self, runtime: Runtime, options: EngineOptions, settings: Settings, *, say: Callable[[str], None]
    ) -> None:
        self._runtime = runtime
        self._options = options
        self._settings = settings
        self._tell = say
        self._report = ModelReport()

    def _say(self, text: str) -> None:
        self._tell(f"{self._runtime.name}: {text}")

    def measure(self, sessions: Sequence[RecordedSession]) -> ModelReport:
        target, options, figures = self._runtime.target, self._options, self._report.figures
        num_rounds = 5 * options.num_rounds
        if options.wants("verify4_over_plain1"):
            self._say("a pass of 4 rows and one of 1 row")
            figures["verify4_over_plain1"] = passes.verify_over_plain(target, num_rows=4, num_rounds=num_rounds)
        if options.wants("step_8k_over_512"):
            self._say("a step at a long and at a short context")
            self._report.sizes["long_context"] = passes.long_context(target)
            figures["step_8k_over_512"] = passes.step_by_context(target, num_rounds=num_rounds)
        if options.wants("prefill_extra_mb"):
            self._measure_memory()
        if options.wants("concurrent8_over_1", *_FROM_A_CONTEST):
            self._measure_decoding([p for session in sessions for p in session_prompts(session, self._runtime)])
        return self._report

    def _measure_decoding(self, prompts: Sequence[RecordedPrompt]) -> None:
        if self._options.wants("concurrent8_over_1"):
            self._measure_concurrency(prompts)
        if self._options.wants(*_FROM_A_CONTEST):
            self._measure_contest(self._chosen(prompts))

    def _chosen(self, prompts: Sequence[RecordedPrompt]) -> list[RecordedPrompt]:
        options = self._options
        most = min(options.max_prompt, self._runtime.target.max_positions - options.max_tokens)
        tools = choose(prompts, "tool", options.num_prompts, max_tokens=most)
        prose = choose(prompts, "prose", max(1, options.num_prompts // 2), max_tokens=most)
        if not tools:
            raise ConfigError(f"no recorded tool call has a prompt of at most {most} tokens; take others, or raise it")
        return [*tools, *prose]

    def _measure_memory(self) -> None:
        if not memory.is_measurable():
            self._say("this system does not count a process's peak memory; prefill_extra_mb is left out")
            return
        num_tokens = passes.long_context(self._runtime.target)
        num_skipped = 0 if self._options.is_whole_prefill else max(0, num_tokens - _QUICK_PREFILL_ROWS)
        self._say(f"the memory of a prefill of {num_tokens} tokens")
        used = memory.prefill_extra(
            _folder(self._runtime.name, self._settings),
            num_tokens=num_tokens,
            num_skipped=num_skipped,
            num_threads=self._settings.threads,
            home=self._settings.home,
        )
        self._report.figures["prefill_extra_mb"] = Spread.of([used.extra_mb])
        self._report.sizes |= {"prefill_tokens": num_tokens, "prefill_skipped": num_skipped}

    def _measure_concurrency(self, prompts: Sequence[RecordedPrompt]) -> None:
        options = self._options
        spread_out = [prompts[i * len(prompts) // passes.NUM_SESSIONS] for i in range(passes.NUM_SESSIONS)]
        ids = [prompt.ids[-options.num_concurrent_rows :] for prompt in spread_out]
        drafters: dict[str, Drafter] = {"concurrent8_over_1": NullDrafter(), "speculative": LookupDrafter()}
        for name, drafter in drafters.items():
            self._say(f"{len(ids)} sessions at once, {'plain' if name in BARS else name}")
            spread = passes.concurrent_over_one(
                self._runtime.target,
                drafter,
                ids,
                max_tokens=options.num_concurrent_tokens,
                num_rounds=options.num_rounds,
            )
            if name in BARS:
                self._report.figures[name] = spread
            else:
                self._report.rates["8 sessions over 1, lookup"] = {"ratio": spread.as_dict()}

    def _measure_contest(self, prompts: Sequence[RecordedPrompt]) -> None:
        side = OurSide(self._runtime.target, end_ids=self._runtime.end_ids)
        contenders = list(self._ours(side))
        if self._options.wants("int8_over_fp32"):
            contenders += self._ours_in_int8()
        if self._options.has_peers and self._options.wants(*_AGAINST_PEERS):
            contenders += self._peers()
        self._say(f"{len(prompts)} prompts, {len(contenders)} ways: {', '.join(c.name for c in contenders)}")
        results = contest(contenders, prompts, max_tokens=self._options.max_tokens, num_rounds=self._options.num_rounds)
        self._report.rates |= {contender.name: results.summary(contender.name) for contender in contenders}
        self._report.sizes["prompt_tokens"] = [len(prompt.ids) for prompt in prompts]
        self._compare_rates(results, [contender.name for contender in contenders])
        self._compare_texts(results, prompts, side)
        if self._options.wants("int8_over_fp32"):
            int8_side = contenders[[c.name for c in contenders].index(INT8_PLAIN)].side
            assert isinstance(int8_side, OurSide)
            self._report.int8_mismatches += _differing(int8_side.target, results, INT8_PLAIN, INT8_LOOKUP, prompts)

    def _ours(self, side: OurSide) -> Iterator[Contender]:
        """Yield plain decoding, lookup, and the drafters asked for, each with a planner that learns for itself."""
        target, layer_ids = side.target, side.target.layer_ids
        yield Contender(PLAIN, side, partial(_plain, side))
        cost = PassCost.of(target, folder=self._settings.home / "calibration")
        yield Contender(LOOKUP, side, partial(_speculative, side, LookupDrafter(), AdaptiveLength(cost), layer_ids))
        for spec in self._options.drafters:
            drafter = load_drafter(spec, target)
            decoder = partial(_speculative, side, drafter, AdaptiveLength(cost), target.layer_ids)
            yield Contender(f"ours {spec}", side, decoder)

    def _ours_in_int8(self) -> list[Contender]:
        self._say("int8 weights")
        target = _load(self._runtime.name, "int8", self._settings).target
        side = OurSide(target, end_ids=self._runtime.end_ids)
        planner = AdaptiveLength(PassCost.of(target, folder=self._settings.home / "calibration"))
        speculative = partial(_speculative, side, LookupDrafter(), planner, target.layer_ids)
        return [Contender(INT8_PLAIN, side, partial(_plain, side)), Contender(INT8_LOOKUP, side, speculative)]

    def _peers(self) -> list[Contender]:
        self._say("a second copy of the weights, for transformers")
        dtype = self._runtime.target.dtype
        stock = peers.load_stock(_folder(self._runtime.name, self._settings), dtype=dtype)
        assistant = self._assistant(stock.config.vocab_size)
        return peers.peer_contenders(peers.PeerSide(stock, end_ids=self._runtime.end_ids), assistant=assistant)

    def _assistant(self, vocab_size: int) -> Any:
        """Load the assistant model, if there is one for this model."""
        name = self._options.assistant
        if name is None:
            return None
        if name == self._runtime.name:
            self._say("its own assistant; transformers' assisted mode is left out")
            return None
        assistant = peers.load_stock(_folder(name, self._settings), dtype=self._runtime.target.dtype)
        if assistant.config.vocab_size != vocab_size:
            self._say(f"{name} has another vocabulary; transformers' assisted mode is left out")
            return None
        return assistant

    def _compare_rates(self, results: Results, names: Sequence[str]) -> None:
        figures = self._report.figures
        if peers.PLAIN in names:
            lookups = [results.ratio(LOOKUP, name, ["tool"]) for name in peers.lookup_names()]
            figures["plain_over_hf"] = results.ratio(PLAIN, peers.PLAIN)
            figures["spec_over_hf"] = results.ratio(LOOKUP, peers.PLAIN, ["tool"])
            figures["spec_over_hf_lookup"] = BARS["spec_over_hf_lookup"].worst(lookups)
        if INT8_PLAIN in names:
            figures["int8_over_fp32"] = results.ratio(INT8_PLAIN, PLAIN)

    def _compare_texts(self, results: Results, prompts: Sequence[RecordedPrompt], side: OurSide) -> None:
        """Compare the greedy texts of the contest, and seeded ones decoded for the purpose."""
        report, target = self._report, side.target
        drafted = [LOOKUP, *(f"ours {spec}" for spec in self._options.drafters)]
        for name in drafted:
            report.mismatches += _differing(target, results, PLAIN, name, prompts)
        if peers.PLAIN in report.rates:
            report.differences += _differing(target, results, PLAIN, peers.PLAIN, prompts)
        if not self._options.wants("mismatches"):
            return
        self._say("seeded texts, plain and speculative")
        modes = {"seeded": sampling_modes(self._options.seed)["seeded"]}
        comparison = Comparison(
            target, LookupDrafter(), self._runtime.end_ids, max_tokens=self._options.max_tokens, modes=modes
        )
        for prompt in prompts:
            found = comparison.prompt([side], prompt.ids)[1]
            report.mismatches += [replace(m, session=prompt.session_id, turn=prompt.turn) for m in found]
        report.figures["mismatches"] = Spread.of([float(len(report.mismatches))])


def _differing(
    target: Target, results: Results, expected: str, got: str, prompts: Sequence[RecordedPrompt]
) -> Iterator[Mismatch]:
    """Yield where the greedy texts of one contender are not those of another."""
    texts = results.tokens(got)
    for index, tokens in results.tokens(expected).items():
        prompt = prompts[index]
        found = first_difference(target, prompt.ids, tokens, texts[index], sampling=SamplingParams())
        if found is not None:
            yield replace(found, session=prompt.session_id, turn=prompt.turn, mode=f"greedy, {got}")


def _folder(model: str, settings: Settings) -> Path:
    with progress_bars() as progress:
        return resolve(model, settings=settings, progress=progress)


def _plain(side: OurSide, ids: Sequence[int], max_tokens: int) -> Run:
    return side.run(ids, NullDrafter(), max_tokens=max_tokens)


def _speculative(
    side: OurSide,
    drafter: Drafter,
    planner: AdaptiveLength,
    layer_ids: Sequence[int],
    ids: Sequence[int],
    max_tokens: int,
) -> Run:
    tap(side.target, layer_ids)
    return side.run(ids, drafter, max_tokens=max_tokens, planner=planner)
