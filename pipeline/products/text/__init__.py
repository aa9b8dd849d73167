"""Kind `text`: checkpoints of language models, served behind an endpoint and asked there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.product import Inputs, OpenReplica, Start, Watched
from pipeline.products.text.settings import HarnessEval, PerplexityEval, TextProduct, ToolCallsEval, TrajectoriesEval
from pipeline.running.environment import Machine, read_available_mib, read_gpu_capabilities, read_gpu_free_mib
from pipeline.settings.base import Eval

if TYPE_CHECKING:
    from pipeline.gate.audits import Auditor
    from pipeline.report.presenting import Presenter


class TextKind:
    """Language models."""

    settings = TextProduct
    evals: Mapping[str, type[Eval]] = {
        "perplexity": PerplexityEval,
        "harness": HarnessEval,
        "tool_calls": ToolCallsEval,
        "trajectories": TrajectoriesEval,
    }
    start_options: Mapping[str, str] = {}
    shards_at_once = 2
    has_servers = True

    def start_product(self, name: str, checkpoint: str, root: Path, options: Mapping[str, str]) -> Start:
        """Return the smallest settings that run, and example cases."""
        from pipeline.products.text.start import start_text

        return start_text(name, checkpoint, root)

    def find_problems(self, product: TextProduct) -> list[str]:
        """Return what contradicts itself in the settings."""
        from pipeline.products.text.problems import find_text_problems

        return find_text_problems(product)

    def check(self, product: TextProduct, root: Path, machine: Machine, *, is_local: bool) -> list[str]:
        """Check layers, tokenizers, chat templates, cases, the benchmark's prompts, engines, kernels and memory."""
        from pipeline.products.text.calibration_checks import warn_of_calibration
        from pipeline.products.text.engine_commands import check_commands
        from pipeline.products.text.evals.known_tasks import describe_tasks
        from pipeline.products.text.hardware import check_ranks, warn_of_fallbacks, warn_of_score_caps
        from pipeline.products.text.memory import (
            Room,
            check_needs,
            estimate_needs,
            read_card_room,
        )
        from pipeline.products.text.preflight import check_text
        from pipeline.products.text.prompt_checks import check_prompts
        from pipeline.products.text.task_checks import check_tasks

        check_ranks(product, len(machine.gpus))
        check_text(product, root)
        absent = check_commands(product, root, is_local=is_local)
        host = Room(machine.memory_mib, read_available_mib(machine.memory_mib))
        card = read_card_room(machine, read_gpu_free_mib()) if machine.gpus else None
        tasks = describe_tasks(product, root)
        task_warnings = check_tasks(product, tasks, root)
        check_prompts(product, tasks, root)
        return [
            *absent,
            *task_warnings,
            *warn_of_calibration(product),
            *check_needs(estimate_needs(product, root, machine), host=host, card=card),
            *warn_of_fallbacks(product, root, read_gpu_capabilities() if machine.gpus else ()),
            *warn_of_score_caps(product, root),
        ]

    def render_costs(self, product: TextProduct, root: Path, machine: Machine, *, build: Path) -> str:
        """Return what each candidate will cost as a table: minutes, memory and disk."""
        from pipeline.products.text.costs import plan_costs, render_costs

        return render_costs(plan_costs(product, root, machine, build=build))

    def list_inputs(self, product: TextProduct, root: Path) -> Inputs:
        """Return drafts and calibration texts of what is built, engine and cases of what is evaluated."""
        from pipeline.evalsets.cards import NOTES
        from pipeline.products.text.chat_templates import has_chat_template
        from pipeline.products.text.evals.known_tasks import digest_evalsets
        from pipeline.products.text.step_settings import WeightStep
        from pipeline.records.digests import digest_folder
        from pipeline.running.kept_digests import digest_watched

        folder = product.optimize.calibration_texts
        texts = None if folder is None else digest_folder(root / folder, ignore=NOTES)
        shared = {
            "evals": {name: e.model_dump(mode="json") for name, e in product.evals.items()},
            "cases": digest_evalsets(product, root),
            "serving": product.serving.model_dump(mode="json"),
            "canary": product.canary.num_prompts,
        }
        if not has_chat_template(product, root):
            shared |= {"is_plain": True}  # prompts of tasks are sent as they stand
        optimize: dict[str, Watched] = {}
        evaluate: dict[str, Watched] = {}
        for name, candidate in product.candidates.items():
            steps = [step.build_record() for step in candidate.steps]
            optimize[name] = {"checkpoint": candidate.checkpoint, "steps": steps}
            rewriting = [step for step in candidate.steps if isinstance(step, WeightStep)]
            if rewriting:
                optimize[name]["num_threads"] = product.optimize.num_threads
            if any(step.calibration is not None for step in rewriting):
                optimize[name]["calibration_texts"] = texts
            if candidate.speculative and candidate.speculative.draft:
                optimize[name]["draft"] = digest_watched(candidate.speculative.draft, root)
            evaluate[name] = shared | {"engine": candidate.engine.model_dump(mode="json")}
            evaluate[name] |= {"trace": True} if candidate.trace else {}
        work = product.benchmark.model_dump(mode="json", exclude={"max_slowdown"})  # the limit is the gate's
        benchmark: Watched = {"work": work, "reference": product.reference}
        if (kv_cache_gib := product.resources.kv_cache_gib) is not None:
            benchmark = {**benchmark, "kv_cache_gib": kv_cache_gib}
        return Inputs(optimize, evaluate, benchmark)

    def preload(self, stage: str, product: TextProduct, root: Path) -> None:
        """Import what the stages import."""
        if stage == "evaluate":
            import pipeline.products.text.evals.evaluate
            from pipeline.products.text.evals.harness import import_library

            for name, settings in product.evals.items():
                if isinstance(settings, HarnessEval):
                    import_library(name, settings)
            return
        import pipeline.products.text.optimize.candidate

        if any(candidate.steps for candidate in product.candidates.values()):
            import pipeline.products.text.optimize.llm_compressor  # noqa: F401

    def optimize(self, name: str, product: TextProduct, *, root: Path, build: Path) -> str:
        """Quantise, and check what will be served."""
        from pipeline.products.text.optimize.candidate import build_candidate

        candidate = build_candidate(name, product, root=root, build=build)
        checkpoint = candidate.checkpoint
        num_made = sum(layer.asked for layer in candidate.coverage)
        done = f"{num_made} layers quantised, {len(candidate.fallbacks)} fallbacks" if num_made else "as it came"
        return (
            f"{checkpoint.format} {checkpoint.dtype}, {checkpoint.num_parameters / 1e6:.2f} M parameters in "
            f"{checkpoint.num_bytes / 1e6:.2f} MB, {done}"
        )

    def evaluate(self, name: str, product: TextProduct, *, root: Path, build: Path) -> None:
        """Ask a candidate's endpoint all evals."""
        import uvloop

        from pipeline.products.text.evals.evaluate import evaluate_candidate
        from pipeline.products.text.serving_config import read_candidate

        uvloop.run(evaluate_candidate(read_candidate(build, name, product), product, root=root, build=build))

    def open_replica(
        self, name: str, product: TextProduct, *, root: Path, build: Path
    ) -> AbstractContextManager[OpenReplica]:
        """Load or serve a candidate once, for shard after shard of its cases."""
        from pipeline.products.text.evals.replica import open_replica
        from pipeline.products.text.serving_config import read_candidate

        return open_replica(read_candidate(build, name, product), product, root=root, build=build)

    def benchmark(self, product: TextProduct, *, root: Path, build: Path) -> list[str]:
        """Time both endpoints side by side; a candidate that was timed just so before is taken over."""
        from pipeline.products.text.benchmark.product import benchmark_product

        return benchmark_product(product, root=root, build=build)

    def get_auditor(self) -> Auditor[TextProduct]:
        """Return what the gate asks beside the scores."""
        from pipeline.products.text.findings import TextAuditor

        return TextAuditor()

    def get_presenter(self) -> Presenter[TextProduct]:
        """Return what the report and MLflow show."""
        from pipeline.products.text.show import TextPresenter

        return TextPresenter()
