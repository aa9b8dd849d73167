"""Is our AP that of pycocotools, and what does it take? `python -m benchmarks.average_precision_time [--images 500]`.

Three made-up result sets (one class and no crowds, three classes with crowds, tied scores), matched and averaged by
`pipeline/records/detections.py` and `average_precision.py`, by pycocotools and by faster-coco-eval: the largest
difference of COCO's twelve numbers, and the CPU seconds of each as ratios, the median of interleaved rounds. The gate
does not average once but 1,000 times: that is timed beside (`benchmarks/detection_bounds.py --time` has it whole).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable

import numpy as np
from faster_coco_eval import COCO as FastCOCO
from faster_coco_eval import COCOeval_faster
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from pipeline.numerics.average_precision import coco_numbers
from pipeline.records.detections import Detections, Objects
from tests.fakes.synthetic_detections import NUM_CLASSES, Detector, detect, make_objects, match_all

SETS = {
    "no crowds": (0.0, Detector()),
    "crowds": (0.1, Detector(miss=0.2, false_alarms=10)),
    "tied scores": (0.0, Detector(digits=1)),
}


def main() -> int:
    """Compare and time."""
    parser = argparse.ArgumentParser(prog="average_precision_time", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(
        "| set | largest difference to pycocotools | ours, CPU s | pycocotools / ours | faster-coco-eval / ours |\n"
        "|---|---:|---:|---:|---:|"
    )
    for name, (crowds, detector) in SETS.items():
        rng = np.random.default_rng(0)
        objects = [make_objects(rng, crowds=crowds) for _ in range(options.images)]
        found = [detect(o, detector, rng) for o in objects]
        ways: dict[str, Callable[[], np.ndarray]] = {
            "ours": lambda o=objects, f=found: np.array(list(coco_numbers(match_all(o, f)).values())),
            "pycocotools": lambda o=objects, f=found: evaluate(o, f, COCO, COCOeval),
            "faster": lambda o=objects, f=found: evaluate(o, f, FastCOCO, COCOeval_faster),
        }
        numbers = {way: run() for way, run in ways.items()}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, run in ways.items():
                start = time.process_time()
                run()
                seconds[way].append(time.process_time() - start)
        gap = np.abs(numbers["ours"] - numbers["pycocotools"]).max()
        ratios = {way: statistics.median(np.divide(seconds[way], seconds["ours"])) for way in ways}
        print(
            f"| {name} | {gap:.1e} | {statistics.median(seconds['ours']):.2f} | {ratios['pycocotools']:.2f} "
            f"| {ratios['faster']:.2f} |",
            flush=True,
        )
    return 0


def evaluate(objects: list[Objects], found: list[Detections], coco: type, evaluator: type) -> np.ndarray:
    """Return the twelve numbers of a library, in their order."""
    truth = [
        {
            "id": k + 1,
            "image_id": i,
            "bbox": box.tolist(),
            "area": float(area),
            "iscrowd": int(crowd),
            "category_id": int(number) + 1,
        }
        for k, (i, box, area, crowd, number) in enumerate(
            (i, *row)
            for i, o in enumerate(objects)
            for row in zip(o.boxes, o.areas, o.is_crowd, o.classes, strict=True)
        )
    ]
    results = [
        {"image_id": i, "bbox": box.tolist(), "score": float(score), "category_id": int(number) + 1}
        for i, d in enumerate(found)
        for box, score, number in zip(d.boxes, d.scores, d.classes, strict=True)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        data = coco()
        data.dataset = {
            "images": [{"id": i} for i in range(len(objects))],
            "annotations": truth,
            "info": {},
            "categories": [{"id": number + 1} for number in range(NUM_CLASSES)],
        }
        data.createIndex()
        run = evaluator(data, data.loadRes(results), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return np.array(run.stats[:12])


if __name__ == "__main__":
    raise SystemExit(main())
