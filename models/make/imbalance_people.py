"""Make `models/people-hard`: the people detector with channels of very unlike size in its high-resolution branch.

    python -m models.make.imbalance_people --source models/people --out models/people-hard

In the branch that finds small people every channel between two convolutions is multiplied by a power of two of its
own, 2**0 to 2**power, and the next convolution divides by it. ReLU commutes with a positive factor and powers of two
with rounding, so in float32 the boxes are the same, bit for bit, and a direct convolution in fp16 has the range for it.
Winograd's F(4x4, 3x3) has not: its transformed inputs overflow where a large channel is active. Networks come to
such channels by training (Nagel et al. 2019, arXiv:1906.04721, who scale them the other way); here it is by
construction, and the card says so. The power is the largest that leaves activations a factor of four below fp16's
end, 65,504, on training scenes; nothing else chose it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

from evalsets.make.scenes import render
from models.make.saving import save_network
from models.make.train_people import TRAIN
from models.people.detector import Detector, open_detector, preprocess

BRANCH = "small"
_HEADROOM = 4.0  # below fp16's largest number
_FP16_MAX = 65504.0


@torch.no_grad()
def imbalance(branch: nn.Sequential, power: int, generator: torch.Generator) -> None:
    """Scale the channels between the convolutions of a branch, in place; what the branch returns stays.

    Args:
        branch: blocks of a convolution and a ReLU, and a convolution at the end.
        power: channels are multiplied by 2**0 to 2**power, each power as likely as another.
        generator: draws the powers.
    """
    convolutions = [module for module in branch.modules() if isinstance(module, nn.Conv2d)]
    for writer, reader in zip(convolutions, convolutions[1:], strict=False):
        factors = 2.0 ** torch.randint(power + 1, (writer.out_channels,), generator=generator)
        writer.weight.mul_(factors.view(-1, 1, 1, 1))
        writer.bias.mul_(factors)
        reader.weight.div_(factors.view(1, -1, 1, 1))


@torch.no_grad()
def find_power(model: Detector, scenes: int, seed: int) -> int:
    """Return the largest power that leaves the branch's activations on training scenes a factor of four in fp16."""
    largest = 0.0

    def note(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, output.abs().max().item())

    handles = [m.register_forward_hook(note) for m in model.branches[BRANCH].modules() if isinstance(m, nn.Conv2d)]
    for index in range(scenes):
        pixels = render(np.random.default_rng([seed, TRAIN, index])).pixels
        model(preprocess(torch.from_numpy(pixels)[None]))
    for handle in handles:
        handle.remove()
    return math.floor(math.log2(_FP16_MAX / _HEADROOM / largest))


def main() -> None:
    """Parse the command line, imbalance, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenes", type=int, default=100, help="training scenes that the power is found on")
    parser.add_argument("--power", type=int, help="instead of the one that is found")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, card = open_detector(args.source), json.loads((args.source / "card.json").read_text())
    power = find_power(model, args.scenes, card["seed"]) if args.power is None else args.power
    imbalance(model.branches[BRANCH], power, torch.Generator().manual_seed(args.seed))
    added = {"imbalanced_branch": BRANCH, "largest_power_of_two": power, "imbalance_seed": args.seed}
    save_network(model, args.out, card | added)
    print(f"{args.out}: channels of branch {BRANCH} times 2**0 to 2**{power}")


if __name__ == "__main__":
    main()
