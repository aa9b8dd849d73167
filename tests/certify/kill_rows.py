"""The rows of the kill table: what is planted in a candidate that has passed, and the changes that must not matter.

`RECORDED`, `COMPARED` and `COMMITTED` need no model, and so run in the tests: the first on any finished project, the
others on small records that each row writes from seeds. The other rows are about the shipped candidates. Those that ask
a server keep one eval, the 2,000 single tool calls, unless they say more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tests.certify import kill_networks, kill_outcomes, kill_pictures, kill_records, kill_serving, kill_weights
from tests.certify.kill_outcomes import SAMPLED, compared
from tests.certify.kill_releases import committed, edit_and_forge, edit_and_freeze, edit_code
from tests.certify.kill_table import Kill, Plant
from tests.certify.kill_trial import Trial
from tests.fakes.synthetic_records import PRODUCT

DRAFTED = {
    "checkpoint": "models/agent",
    "steps": [
        {"kind": "speculative", "method": "draft_model", "draft": "models/agent-draft", "num_speculative_tokens": 5}
    ],
}

# as awq-long-g32, but for the length of the search: what is planted strikes after it
QUANTISED_ANEW = {
    "checkpoint": "models/agent",
    "steps": [
        {
            "kind": "awq",
            "bits": 4,
            "group_size": 32,
            "symmetric": True,
            "exclude": ["lm_head"],
            "num_grid_points": 3,
            "calibration": {
                "sources": ["prose", "tool_calls", "workflows"],
                "num_samples": 16,
                "max_tokens": 128,
                "length_exponent": 1,
            },
        }
    ],
}


def in_folder(change: Callable[[Path], None], *evals: str) -> Plant:
    """Return what changes the candidate's folder and evaluates it, on evals of some kinds or on all."""

    def plant(trial: Trial) -> None:
        if evals:
            trial.keep_evals(*evals)
        trial.change_weights(change)
        trial.evaluate()

    return plant


def in_quantiser(change: Callable[[kill_weights.Tensors], None]) -> Plant:
    """Return what quantises anew, by a library that changes tensors when it saves them, and evaluates the outcome."""

    def plant(trial: Trial) -> None:
        from pipeline.products.text.optimize import llm_compressor

        save = llm_compressor.save_compressed

        def save_changed(model: object, folder: Path) -> None:
            save(model, folder)
            kill_weights.edit_tensors(change)(Path(folder))

        with mock.patch.object(llm_compressor, "save_compressed", save_changed):
            trial.optimize()
        trial.evaluate()

    return plant


def do_nothing(trial: Trial) -> None:
    """Leave the copy as it is."""


RECORDED = [
    Kill("another folder", "the copy as it is", do_nothing, must_pass=True),
    Kill(
        "shuffled case order",
        "records of two evals in the reverse order, sealed again",
        kill_records.rewrite(kill_records.reverse, "tool_calls", "trajectories"),
        must_pass=True,
    ),
    Kill(
        "stale records",
        "one weight changed, the records of before",
        kill_records.leave_records,
        because="what was evaluated is not what would ship",
    ),
    Kill(
        "weights swapped after the verdict",
        "one weight changed after `compare`",
        kill_records.swap_after_verdict,
        because="what would ship has",
    ),
    Kill(
        "duplicated cases",
        "every case twice, sealed again",
        kill_records.rewrite(kill_records.double),
        because="every case may count once",
    ),
    Kill(
        "duplicated cases, renamed",
        "every case twice under two ids, sealed again",
        kill_records.rewrite(kill_records.double_renamed),
        because="every case may count once",
    ),
    Kill(
        "truncated jsonl",
        "half of the bytes of a file of records",
        kill_records.cut,
        because="edited or cut after they were written",
    ),
    Kill(
        "truncated jsonl, sealed again",
        "nine tenths of the cases",
        kill_records.rewrite(kill_records.drop_last),
        because="have no partner",
    ),
    Kill(
        "reordered prompts in the records",
        "each answer beside the next question, sealed again",
        kill_records.rewrite(kill_records.rotate_digests),
        because="is in cluster",
    ),
    Kill(
        "edited records",
        "every score of 0 made a 1",
        kill_records.raise_scores,
        because="edited or cut after they were written",
    ),
    Kill(
        "edited verdict.json: outcome",
        "a failing candidate's `pass`",
        kill_records.edit_verdict(lambda _: None),
        because="the file was edited",
    ),
    Kill(
        "edited verdict.json: comparisons",
        "the same, and `pass` in each comparison",
        kill_records.edit_verdict(kill_records.pass_comparisons),
        because="the file was edited",
    ),
    Kill(
        "edited verdict.json: left out",
        "the same, without the comparisons that failed",
        kill_records.edit_verdict(kill_records.drop_failed),
        because="the file was edited",
    ),
    Kill(
        "edited metrics file",
        "a failing candidate with metrics/*.json of one that passed",
        kill_records.edit_metrics,
        because="task_completion_rate",
    ),
]

COMPARED = [
    Kill(
        "a safety table beside samples",
        "lm-eval's samples are alike, `safety.csv` falls from 100 % to 0 %",
        compared(kill_outcomes.lose_safety, *SAMPLED),
        because="safety/score: beyond tolerance: lost 100.00 points",
    ),
    Kill(
        "an eval of one side alone",
        "`safety.csv` in the reference's folder only",
        compared(kill_outcomes.forget_safety, *SAMPLED),
        because="safety: .* the candidate has no fit outcomes of it",
    ),
    Kill(
        "a compressed table",
        "`safety.csv.gz` in both folders, beside samples",
        compared(kill_outcomes.compress_safety, *SAMPLED),
        because=r"safety\.csv\.gz: .* was not judged",
    ),
    Kill(
        "the reference's records as the candidate's",
        "a copy of the file",
        compared(kill_outcomes.copy_reference, file="table.csv"),
        because="holds the same bytes as the reference's",
    ),
    Kill(
        "a loss diluted by repeats",
        "50 of 1,000 questions lost, the other 950 there three times",
        compared(kill_outcomes.repeat_unflipped, file="table.csv"),
        because=r"lost 5.00 points \(b 50 against c 0\)",
    ),
    Kill(
        "toxicity 0.1 -> 0.95",
        "under `--tolerance 3`, meant as 3 points",
        compared(kill_outcomes.poison, "--better", "toxicity=lower", "--tolerance", "3", file="table.csv"),
        because="a loss above the tolerance of 3 can't show",
    ),
    Kill(
        "clusters that may be lost, amid churn",
        "45 clusters x 60 cases, b 299, c 300",
        compared(kill_outcomes.churn, file="table.csv"),
        because=r"not proven \(the loss may be 7\.\d\d points\)",
    ),
    Kill(
        "harm in one document in 50",
        "a perplexity 2 % worse in truth, of 62 documents none shows it",
        compared(kill_outcomes.lose_documents, "--tolerance", "0.02"),
        because=r"word_perplexity: within tolerance as seen .* not proven \(the loss may be 1\d\.\d\d %\)",
    ),
    Kill(
        "an alias bomb as policy",
        "YAML of 12 lines that stands for 9^12 values",
        compared(kill_outcomes.write_bomb, "--policy", "policy.yaml", file="table.csv"),
        because="with every alias written out",
    ),
    Kill(
        "a whole category lost",
        "a detector of 80 categories finds none of 201 people, AP -0.9",
        kill_networks.lose_people,
        because=r"shelves/ap \[person\] falls from",
    ),
    Kill(
        "NaN in 4 of 4 pictures",
        "`finite` 0 in all, too few for a test to rule out chance",
        kill_networks.overflow_in_all,
        because=r"finite_output_rate: no valid output: 100\.0 % became 0\.0 %",
    ),
    Kill(
        "trials of each question",
        "300 questions three times each, under ids of their own",
        compared(kill_outcomes.repeat_all, file="table.csv"),
        must_pass=True,
    ),
    Kill(
        "notes beside the records",
        "README.md and lm-eval's results file in both folders",
        compared(kill_outcomes.leave_notes),
        must_pass=True,
    ),
]

COMMITTED = [
    Kill(
        "recipe edited, dvc.lock forged",
        "a released candidate's group size, as if every stage had run on it",
        committed(edit_and_forge),
        because=r"candidates\.\w+\.steps\.0\.group_size: release/agent/params\.yaml has",
    ),
    Kill(
        "recipe edited, stages frozen",
        "the same, and `frozen: true` on the stages that judge",
        committed(edit_and_freeze),
        because=f"compare@{PRODUCT}: .*frozen: DVC would never run it",
    ),
    Kill(
        "several stages out of date",
        "other code of `compare` and of a stage beside it, in a clone without records",
        committed(edit_code("compare", "measure")),
        because=rf"out of date: (?=.*\bmeasure\b).*\bcompare@{PRODUCT}, gate@{PRODUCT}, release@{PRODUCT}\b",
    ),
    Kill(
        "code that runs anyway",
        "other code of `gate`, which gates the clone itself",
        committed(edit_code("gate")),
        must_pass=True,
    ),
]

WEIGHTS = {
    "wrong zero-point in one layer": (
        f"every INT4 value of `{kill_weights.LAYER}` one higher",
        kill_weights.shift_values,
    ),
    "one group's scale x1.5": (f"`{kill_weights.LAYER}.weight_scale[0, 0]`", kill_weights.stretch_scale),
    "one block at 3 bits": (f"every other of the 16 values in `{kill_weights.BLOCK}`", kill_weights.drop_bit),
}
QUANTISED = [
    Kill(
        name,
        f"{how}, when the quantiser saves",
        in_quantiser(change),
        candidate="awq-anew",
        settings=QUANTISED_ANEW,
        because="steps from the source's",
    )
    for name, (how, change) in WEIGHTS.items()
]

SERVED = [
    Kill(
        "chat template dropped",
        "no chat_template.jinja",
        in_folder(kill_weights.drop_template),
        because="no chat template",
    ),
    Kill(
        "stop string lost",
        "`eos_token_id` is the padding token",
        in_folder(kill_weights.lose_stop, "tool_calls"),
        because="tool_call_exact_match",
    ),
    Kill(
        "max_tokens 8",
        "a proxy asks the server for 8",
        kill_serving.attach(kill_serving.cut_answers(8)),
        because="tool_call",
    ),
    Kill(
        "sampling on",
        "the embedded server with `do_sample`, temperature 1",
        kill_serving.launch("tests.fakes.sampling_launcher"),
        because="the server is not greedy",
    ),
    Kill(
        "draft accepted without verification",
        "the embedded server answers with the draft's tokens",
        kill_serving.launch("tests.fakes.unverified_launcher"),
        candidate="drafted",
        settings=DRAFTED,
        because="differs from plain greedy decoding",
    ),
    Kill(
        "endpoint serving the reference",
        "attached to a server of the reference's weights; prose and tool calls",
        kill_serving.attach(evals=("tool_calls", "perplexity"), serves_reference=True),
        because="answers with the reference's weights",
    ),
    Kill(
        "stale cache",
        "other weights (`gptq-short`), journal and records of before",
        kill_serving.keep_journal("gptq-short"),
        because="tool_call",
    ),
    Kill(
        "5 % empty replies",
        "a proxy empties one in 20",
        kill_serving.attach(kill_serving.empty_now_and_then()),
        because="tool_call",
    ),
    Kill(
        "reordered prompts",
        "a proxy answers with what belongs to the chat before",
        kill_serving.attach(kill_serving.swap_answers()),
        because="tool_call",
    ),
    Kill(
        "unequal token counts",
        "the candidate is asked for one token less in the timed work",
        kill_serving.time_candidate(change=lambda num: num - 1),
        because="completion tokens",
    ),
    Kill(
        "timing without synchronise",
        "the candidate's clock is read when its first token is there",
        kill_serving.time_candidate(clock=kill_serving.stop_at_first),
        because="all tokens of an answer at once",
    ),
    Kill(
        "weights saved again",
        "two shards, other order, other metadata; all evals",
        in_folder(kill_weights.save_again),
        must_pass=True,
    ),
    Kill(
        "another concurrency",
        "a quarter of the requests in flight, both sides",
        kill_serving.serve_less_at_once,
        must_pass=True,
    ),
]

PICTURES = [
    Kill(
        "fp16 NaN in 1 of 50 images",
        "in the decoder's output of `vae-fp16`",
        kill_pictures.overflow_in_some,
        product="shots",
        candidate="vae-fp16",
        because="shots/",
    ),
    Kill(
        "CFG 15 without rescale",
        "guidance 15 where the reference has 5",
        kill_pictures.build_and_evaluate,
        product="shots",
        candidate="cfg-15",
        settings={"checkpoint": "models/product-shots", "steps": [{"kind": "guidance", "scale": 15}]},
        because="shots/",
    ),
    Kill(
        "6 % of small boxes lost",
        "boxes below 32 x 32 pixels of `people-again`",
        kill_pictures.in_workers("pipeline.products.vision.evaluate.run_batch", kill_pictures.run_losing_small),
        product="people",
        candidate="people-again",
        because="scenes/ap",
    ),
    Kill(
        "a 4-level seam",
        "every other column of tiles of `tiled-hann` 4 levels brighter",
        kill_pictures.in_workers("pipeline.products.vision.evaluate.run_batch", kill_pictures.run_with_seam),
        product="upscaler",
        candidate="tiled-hann",
        because="seam_step_levels",
    ),
    Kill(
        "channels-last",
        "`shots-channels-last` evaluated again",
        kill_pictures.build_and_evaluate,
        product="shots",
        candidate="shots-channels-last",
        must_pass=True,
    ),
]

UNTRAINED = [*RECORDED, *COMPARED, *COMMITTED]
ROWS = [*UNTRAINED, *QUANTISED, *SERVED, *PICTURES]
# what a loss in the weights comes to where nobody looks at them: measured, and not a part of the score
MEASURED = [
    Kill(f"{name}, unseen", f"{how}, in the finished folder", in_folder(kill_weights.edit_tensors(change)))
    for name, (how, change) in WEIGHTS.items()
]
