"""Run a quantisation step from a checked source to a checked output folder.

The output is read back from disk and judged, never the model in memory. Tokenizer, chat
template and generation config are copied, because a tokenizer that is saved again comes out
different.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import QuantgateError, QuantizationError
from pipeline.evalsets.cards import Evalset
from pipeline.products.text.checkpoints import embedding_rows, open_checkpoint
from pipeline.products.text.model_config import read_config
from pipeline.products.text.model_loading import (
    estimate_load_bytes,
    hide_progress_bars,
    load_model,
    load_tokenizer,
    read_free_bytes,
)
from pipeline.products.text.optimize.calibration import count_samples, select_samples
from pipeline.products.text.optimize.coverage import check_coverage
from pipeline.products.text.optimize.kept_tensors import check_kept
from pipeline.products.text.optimize.layers import LayerPlan, check_rank, check_source, plan_layers
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.optimize.ranges import check_ranges
from pipeline.products.text.optimize.ranks import quantize_by_ranks
from pipeline.products.text.optimize.reconstruction import check_reconstruction
from pipeline.products.text.schemes import unpacks_to_bfloat16
from pipeline.products.text.step_settings import QuantizeStep
from pipeline.records.digests import TEXT_FILES, digest_files
from pipeline.records.evaluations import Fallback, LayerCoverage
from pipeline.records.speculation import SpeculativeConfig
from pipeline.running.gpu_failures import explain_gpu_failure
from pipeline.running.weight_files import check_finite, iterate_weights, read_tensors

_REMEDY = "end what else runs on the GPU, or use a larger card"
_PROBE_TOKENS = 16  # length of the forward pass that proves finite logits


@dataclass(frozen=True)
class StepResult:
    """What a step did: for the candidate's record."""

    coverage: tuple[LayerCoverage, ...]
    fallbacks: tuple[Fallback, ...]
    record: dict[str, Any]
    speculative: SpeculativeConfig | None = None
    files: dict[str, str] | None = None  # digests of what it wrote, by name
    seconds: dict[str, float] = field(default_factory=dict)  # by phase


def quantize(source: Path, destination: Path, *, step: QuantizeStep, calibration_set: Evalset | None) -> StepResult:
    """Quantise the checkpoint at `source` into the new folder `destination`.

    GPTQ: Frantar, Ashkboos, Hoefler, Alistarh 2022, arXiv 2210.17323, algorithm 1; `activation_order` is
    llm-compressor's static order, which changes no format and costs nothing when serving. AWQ: Lin et al. 2023, arXiv
    2306.00978, section 3.2; a layer that no scale fits (an output projection behind grouped-query attention, for one)
    is rounded without, which is a fallback.

    Args:
        source: a dense checkpoint.
        destination: must not exist.
        step: algorithm, schemes, exclusions and calibration.
        calibration_set: an evalset of kind "documents"; None where the step calibrates nothing.

    Raises:
        QuantizationError: the step can't be done, or its output is not what was asked for.
        CheckpointError: the source, or the output when it is loaded again, is broken.
    """
    log = StepLog(step.algorithm)
    with log.phases.measure("load the tokenizer"):
        open_checkpoint(source)
        check_source(source)
        tokenizer = load_tokenizer(source)
        samples = _select_samples(calibration_set, tokenizer, step, source)
    with log.phases.measure("load the model"):
        model = load_model(source, dtype="auto")
    with log.phases.measure("check the source"):
        check_finite(model.state_dict().items(), where=source)
    plan = plan_layers(_linear_shapes(model), step, tied_head=_tied_head(model))
    if samples:
        check_rank(plan, step, num_tokens := sum(map(len, samples)))
        # the first layer's loss comes after every sample has been through it
        print(f"{step.algorithm} calibrates on {len(samples)} samples, {num_tokens} tokens", flush=True)
    log.total = len(plan.asked)
    if step.world_size > 1:
        del model
        with log.phases.measure("quantise by ranks"):
            quantize_by_ranks(source, destination, step=step, plan=plan, log=log, samples=samples)
        (destination / "recipe.yaml").unlink(missing_ok=True)
    else:
        _run(model, tokenizer, step, plan, log, samples=samples, destination=destination)
        with log.phases.measure("free the model"):
            del model
            _forget_model()
    copy_text_files(source, destination)
    probe = samples[0][:_PROBE_TOKENS] if samples else list(range(min(_PROBE_TOKENS, len(tokenizer))))
    # digested beside the checks: hashing lets other threads run
    with ThreadPoolExecutor(1) as pool:
        digesting = pool.submit(digest_files, destination)
        with explain_gpu_failure("checking the output", remedy=_REMEDY, error_type=QuantizationError):
            coverage = _check_output(destination, probe, source=source, step=step, plan=plan, log=log)
        with log.phases.measure("digest"):
            files = digesting.result()
    record = step.build_record() | ({"calibrated_on": count_samples(samples)} if samples else {})
    return StepResult(coverage, tuple(log.fallbacks), record, files=files, seconds=log.phases.seconds)


def _select_samples(texts: Evalset | None, tokenizer: Any, step: QuantizeStep, source: Path) -> list[list[int]]:
    if step.calibration is None or texts is None:
        return []
    return select_samples(texts, tokenizer, step.calibration, vocab_size=embedding_rows(source))


def _check_output(
    folder: Path, token_ids: list[int], *, source: Path, step: QuantizeStep, plan: LayerPlan, log: StepLog
) -> tuple[LayerCoverage, ...]:
    coverage = check_coverage(folder, source=source, plan=plan, log=log)
    device = _choose_device(folder)
    with log.phases.measure("check the weights"):
        check_reconstruction(folder, source=source, step=step, plan=plan, log=log, device=device)
        check_kept(folder, source=source, plan=plan, log=log)
        check_ranges(folder, plan=plan, log=log)
        check_finite(iterate_weights(folder), where=folder)
    if step.algorithm != "rtn":
        for layer in plan.asked:
            if layer not in log.losses:
                reason = f"rounded to nearest: no {step.algorithm} rule of the library fits this layer"
                log.record_fallback(layer, reason)
    with log.phases.measure("check the logits"):
        _check_logits(folder, token_ids, device=device)
    return coverage


def copy_text_files(source: Path, destination: Path) -> None:
    """Copy tokenizer, chat template and generation config byte by byte; drop what was written instead."""
    for name in TEXT_FILES:
        (destination / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def _linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    import torch

    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def _tied_head(model: Any) -> str | None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    return next(name for name, module in model.named_modules() if module is head)


def _run(
    model: Any,
    tokenizer: Any,
    step: QuantizeStep,
    plan: LayerPlan,
    log: StepLog,
    *,
    samples: list[list[int]],
    destination: Path,
) -> None:
    with log.phases.measure("import the library"):
        from pipeline.products.text.optimize.llm_compressor import build_recipe, run_recipe, save_compressed
    try:
        with explain_gpu_failure(
            "quantising", remedy=f"lower calibration.max_tokens, {_REMEDY}", error_type=QuantizationError
        ):
            with log.phases.measure("quantise"):
                run_recipe(model, tokenizer, build_recipe(step, plan, log, model=model), samples=samples)
            with log.phases.measure("save"):
                save_compressed(model, destination)
    except QuantgateError:
        raise
    except Exception as error:  # a model that the library knows in part fails in any way
        message = " ".join(str(error).split()).rstrip(".")[:300]
        hint = "; use algorithm gptq or rtn, without smoothing_strength, where it does not know a model's layers"
        moves_scales = step.algorithm == "awq" or step.smoothing_strength is not None
        raise QuantizationError(
            f"llm-compressor failed: {type(error).__name__}: {message}{hint if moves_scales else ''}"
        ) from error
    (destination / "recipe.yaml").unlink(missing_ok=True)


def _forget_model() -> None:
    from pipeline.products.text.optimize.llm_compressor import forget_model

    forget_model()


def _choose_device(folder: Path) -> str:
    """Return the GPU where there is one with room for the checkpoint, packed and unpacked, else the CPU."""
    import torch

    stored = sum(tensor.num_bytes for tensor in read_tensors(folder).values())
    is_roomy = torch.cuda.is_available() and read_free_bytes("cuda") > stored + estimate_load_bytes(
        folder, dtype="auto"
    )
    return "cuda" if is_roomy else "cpu"


def _check_logits(folder: Path, token_ids: list[int], *, device: str) -> None:
    import torch

    # some formats are unpacked into bfloat16 whatever the other weights are in, and no product mixes the two
    dtype = "bfloat16" if unpacks_to_bfloat16(read_config(folder).get("quantization_config") or {}) else "auto"
    # packed weights are unpacked by the first forward pass
    with torch.inference_mode(), hide_progress_bars():
        model = load_model(folder, dtype=dtype, device=None if device == "cpu" else device)
        logits = model(input_ids=torch.tensor([token_ids], device=device)).logits
    if not bool(logits.isfinite().all()):
        raise QuantizationError(f"{folder}: loaded again, its logits are NaN or infinite; raise damping_fraction")
