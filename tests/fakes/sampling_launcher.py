"""A server of the embedded engine with sampling on: `python -m tests.fakes.sampling_launcher` for the kill table."""

from __future__ import annotations

import sys
from typing import Any

from pipeline.products.text.serving import launcher, loading

make_greedy = loading.greedy_config


def make_sampling(model: Any, tokenizer: Any) -> Any:
    """Return the config that the checkpoint would be served with, but for the sampling."""
    config = make_greedy(model, tokenizer)
    config.do_sample, config.temperature = True, 1.0
    return config


if __name__ == "__main__":
    loading.greedy_config = make_sampling
    sys.exit(launcher.main(sys.argv[1:]))
