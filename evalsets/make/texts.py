"""The depot's other texts: prose, how a story goes on, and single tool calls.

Same world and words as `depot.py`, drawn from a `random.Random`. `split_of` decides by content
which texts may be trained on, calibrated with or evaluated, so the three are disjoint by
construction whatever the seeds are.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from random import Random
from typing import Any

from evalsets.make.depot import CITIES, COURIERS, DEFAULT_COURIER, ITEMS, PEOPLE, STORES

_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_WEATHER = "rain snow fog sun wind frost heat".split()
_MOODS = "tired cheerful late early quiet busy proud worried".split()
_ADJECTIVES = "old new broken heavy small red green blue white bright".split()


def split_of(text: str) -> str:
    """Return "train" (78 %), "calibration" (11 %) or "eval" (11 %) from the text's sha256."""
    byte = hashlib.sha256(text.encode()).digest()[0]
    return "train" if byte < 200 else "calibration" if byte < 228 else "eval"


_SENTENCES = (
    "{person} came to {store} in the morning and counted {n} {item}.",
    "The {courier} to {city} was late because of the {weather}.",
    "{person} was {mood}, but {other} was {mood2}.",
    "On {day} the {adjective} {item} was sent from {store} to {city}.",
    "There were {n} {item} at {store} and {m} at {store2}.",
    "{other} asked {person} whether the {adjective} {item} had arrived from {city}.",
    "Nobody at {store} knew where the {item} had gone.",
    "After the {weather} of {day}, {person} moved {n} {item} to {store2}.",
    "{person} wrote to {city} that the {item} would go by {courier}.",
    "The {adjective} {item} stood near the door of {store} until {day}.",
    "{other} said that {city} needs {n} {item} before {day}.",
    "It was {day}, and the {weather} had not stopped.",
    "Then {person} found the {adjective} {item} behind the {item2}.",
    "By {courier} it takes {m} days to {city}, and {n} with {weather}.",
    "{person} and {other} went home when {store} closed.",
    "The list said {n} {item}, but {person} saw only {m}.",
    '"Send the {item} to {city}," said {other}, "and keep the {item2} here."',
    "Every {day} somebody from {city} asks for a {adjective} {item}.",
    "{other} keeps the {item2} in {store2} and the {item} in {store}.",
    "So the {courier} left for {city} with {n} {item} and one {adjective} {item2}.",
)


def make_prose(rng: Random) -> str:
    """Draw a short story about one depot: a fixed cast, 14 to 26 sentences."""
    return " ".join(_draw_story(rng)[0])


def _draw_story(rng: Random) -> tuple[list[str], set[str]]:
    """Draw a story's sentences and its cast: the people, cities, items and stores that it may name."""
    people, cities = rng.sample(PEOPLE, 3), rng.sample(CITIES, 3)
    items, stores = rng.sample(ITEMS, 4), rng.sample(STORES, 3)
    sentences = []
    for _ in range(rng.randint(14, 26)):
        (person, other), (item, item2) = rng.sample(people, 2), rng.sample(items, 2)
        store, store2 = rng.sample(stores, 2)
        sentences.append(
            rng.choice(_SENTENCES).format(
                person=person,
                other=other,
                item=item,
                item2=item2,
                store=store,
                store2=store2,
                city=rng.choice(cities),
                n=rng.randint(2, 30),
                m=rng.randint(2, 30),
                day=rng.choice(_DAYS),
                weather=rng.choice(_WEATHER),
                mood=rng.choice(_MOODS),
                mood2=rng.choice(_MOODS),
                adjective=rng.choice(_ADJECTIVES),
                courier=rng.choice(COURIERS),
            )
        )
    return sentences, {*people, *cities, *items, *stores}


@dataclass(frozen=True)
class Continuation:
    """The start of a story, four sentences to go on with, and which of them is the story's own."""

    start: str
    choices: list[str]
    answer: int


_WORD = re.compile(r"\w+")


def make_continuation(rng: Random) -> Continuation:
    """Draw a story's start, 4 to 10 sentences, and four sentences to go on with.

    A wrong sentence is the story's next one with a name that the story does not use. The story's own name is not
    always known yet, so nobody is right every time.
    """
    while True:
        sentences, cast = _draw_story(rng)
        at = rng.randint(4, 10)
        named = [word for word in _WORD.findall(sentences[at]) if word in cast]
        if named:
            break
    name = rng.choice(named)
    pool = next(pool for pool in (PEOPLE, CITIES, ITEMS, STORES) if name in pool)
    others = rng.sample([other for other in pool if other not in cast], 3)
    choices = [sentences[at], *(re.sub(rf"\b{name}\b", other, sentences[at]) for other in others)]
    rng.shuffle(choices)
    return Continuation(" ".join(sentences[:at]), choices, choices.index(sentences[at]))


@dataclass(frozen=True)
class SingleCall:
    """A request in words and the one call that answers it."""

    request: str
    name: str
    arguments: dict[str, Any]
    accepted: dict[str, tuple[Any, ...]]


_OPENINGS = ("", "Please ", "Now ", "Quick: ", "Next, ", "When you can, ", "Before noon, ", "For the record, ")


def make_single_call(rng: Random) -> SingleCall:
    """Draw a request for one tool call; half of them name the item in the plural."""
    item, person, other = rng.choice(ITEMS), *rng.sample(PEOPLE, 2)
    (store, to), city, n = rng.sample(STORES, 2), rng.choice(CITIES), rng.randint(1, 30)
    plural = rng.random() < 0.5
    shown = item + "s" if plural else item
    name = rng.choice(["order", "order", "stock", "approve", "move", "tell", "tell", "skip", "account"])
    if name == "order":
        courier = rng.choice([None, *COURIERS])
        text = rng.choice(
            [
                "send {n} {i} from {s} to {c}{v}",
                "order {n} {i} out of {s} for {c}{v}",
                "{c} needs {n} {i}, take them at {s}{v}",
            ]
        ).format(n=n, i=shown, s=store, c=city, v=f" by {courier}" if courier else "")
        arguments = {"item": item, "n": n, "store": store, "city": city, "via": courier or DEFAULT_COURIER}
    elif name == "stock":
        text = rng.choice(["look up the {i}", "check which stores hold {i}", "how many {i} are there"]).format(i=shown)
        arguments = {"item": item}
    elif name == "approve":
        text = rng.choice(["ask {p} to approve the {i}", "get the {i} approved by {p}"]).format(p=person, i=shown)
        arguments = {"person": person, "item": item}
    elif name == "move":
        text = rng.choice(["move {n} {i} from {s} to {t}", "take {n} {i} over to {t} from {s}"]).format(
            n=n, i=shown, s=store, t=to
        )
        arguments = {"item": item, "n": n, "store": store, "to": to}
    elif name == "tell":
        cc = rng.random() < 0.5
        text = rng.choice(["tell {p} there are {n} {i}{o}", "let {p} know of {n} {i}{o}"]).format(
            p=person, n=n, i=shown, o=f", copy {other}" if cc else ""
        )
        arguments = {"person": person, "item": item, "n": n} | ({"cc": other} if cc else {})
    elif name == "skip":
        why, words = rng.choice(
            [
                ("item", "no such item"),
                ("stock", "too few in stock"),
                ("rule", "against the rules"),
                ("scope", "not our job"),
            ]
        )
        line = rng.randint(1, 12)
        text, arguments = f"skip line {line}, {words}", {"line": line, "why": why}
    else:
        account = f"{rng.choice('ABCDEFGH')}{rng.randint(10, 99)}"
        text, arguments = (
            rng.choice(["open account {a}", "read the rules of account {a}"]).format(a=account),
            {"id": account},
        )
    accepted = {"item": (item, item + "s")} if plural and "item" in arguments else {}
    return SingleCall(rng.choice(_OPENINGS) + text + ".", name, arguments, accepted)
