"""A server of the embedded engine that takes what the draft says: `python -m tests.fakes.unverified_launcher`.

For the kill table. The target is fed nothing, and the counts say that it accepted every drafted token.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

for package in ("sklearn", "scipy"):  # as the launcher has it, which comes too late for the import below
    sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # an import of it fails

from pipeline.products.text.serving import launcher, speculation  # noqa: E402


def accept_all(self: Any, inputs: dict[str, Any], config: Any, streamer: Any = None) -> Any:
    """Answer with the draft's own tokens, in place of `SpeculativeManager.generate`."""
    num_prompt, drafts = inputs["input_ids"].shape[-1], self._config.num_tokens
    sequence = self._loaded.draft.generate(**inputs, generation_config=config)[0]
    said = sequence.tolist()
    known = range(num_prompt, len(said), drafts + 1)  # tokens before each pass that never was
    fed = [said[: num_prompt + drafts], *(said[n - 1 : n + drafts] for n in itertools.islice(known, 1, None))]
    return sequence[num_prompt:], speculation.count_speculation(fed, said, num_prompt, self._config)


if __name__ == "__main__":
    speculation.SpeculativeManager.generate = accept_all  # type: ignore[method-assign]  # the fault
    sys.exit(launcher.main(sys.argv[1:]))
