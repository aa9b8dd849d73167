"""The depot: a small world with goods, stores and rules, from which all shipped text is made.

An agent at a depot reads a task (rules first, then numbered lines), calls tools as JSON, reads
their results and ends with `finish`. The rules bind whichever later call they touch: a store to
avoid, a limit per order, a total for all orders, the courier, an approval, a copy on every message. They stand in the
task, or in the account that step 1 opens. Everything is drawn from a `random.Random`, so one
seed gives one text. The teacher here knows the world's state and always acts rightly; what it
did is the training text of `models/agent` and the expectation of the evalsets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pipeline.evalsets.cards import Effect, Tool
from pipeline.products.text.evals.tools import call_tool, read_path, render_result

STORES = ["north", "south", "east", "west", "harbor", "airport", "center", "mill"]
COURIERS = ["rail", "van", "air", "boat", "bike", "truck"]
DEFAULT_COURIER = "post"
ITEMS = (
    "lamp chair table mirror carpet shelf clock vase candle pillow blanket curtain kettle teapot bowl plate "
    "spoon fork knife pan bucket broom ladder hammer wrench drill saw rope cable battery radio speaker camera "
    "printer keyboard monitor tablet helmet jacket glove boot scarf tent lantern compass canoe paddle anchor"
).split()
UNKNOWN_ITEMS = "dragon castle rainbow comet volcano unicorn glacier planet".split()
PEOPLE = (
    "Ada Ben Cleo Dan Eva Finn Gina Hugo Iris Jack Kira Liam Mona Nils Olga Paul Quinn Rosa Sven Tara Umar Vera "
    "Walt Zoe"
).split()
CITIES = (
    "Oslo Rome Lima Cairo Paris Tokyo Delhi Quito Sofia Berlin Dublin Havana Lisbon Madrid Moscow Nairobi Prague "
    "Riga Seoul Tallinn Vienna Warsaw Zagreb Athens"
).split()
MAX_CALLS = 12
LINE_WEIGHTS = {"buy": 56, "move": 20, "report": 20, "chat": 4}


def _object(**properties: Any) -> dict[str, Any]:
    optional = {"cc"}
    return {
        "type": "object",
        "properties": properties,
        "required": [key for key in properties if key not in optional],
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 1}
_STORE = {"type": "string", "enum": STORES}

TOOLS: dict[str, Tool] = {
    "account": Tool(
        description="Open the account and read its rules.", parameters=_object(id=_TEXT), returns="state:accounts.{id}"
    ),
    "stock": Tool(
        description="How many of an item each store holds.",
        parameters=_object(item=_TEXT),
        returns="state:stock.{item}",
    ),
    "order": Tool(
        description="Send n of an item from a store to a city.",
        parameters=_object(
            item=_TEXT,
            n=_COUNT,
            store=_STORE,
            city=_TEXT,
            via={"type": "string", "enum": [DEFAULT_COURIER, *COURIERS]},
        ),
        effects=(
            Effect(do="subtract", path="stock.{item}.{store}", value="{n}"),
            Effect(
                do="append",
                path="orders",
                value={"item": "{item}", "n": "{n}", "store": "{store}", "city": "{city}", "via": "{via}"},
            ),
            Effect(do="add", path="sent", value="{n}"),
        ),
        returns={"sent": "state:sent"},
    ),
    "approve": Tool(
        description="Ask a person to approve an order.",
        parameters=_object(person=_TEXT, item=_TEXT),
        effects=(Effect(do="append", path="approvals", value={"person": "{person}", "item": "{item}"}),),
        returns={"ok": True},
    ),
    "move": Tool(
        description="Move n of an item between stores.",
        parameters=_object(item=_TEXT, n=_COUNT, store=_STORE, to=_STORE),
        effects=(
            Effect(
                do="append",
                path="moves",
                value={"item": "{item}", "n": "{n}", "store": "{store}", "to": "{to}"},
            ),
        ),
        returns={"ok": True},
    ),
    "tell": Tool(
        description="Tell a person how many of an item a store holds.",
        parameters=_object(person=_TEXT, item=_TEXT, n={"type": "integer"}, cc=_TEXT),
        effects=(
            Effect(
                do="append",
                path="messages",
                value={"person": "{person}", "item": "{item}", "n": "{n}", "cc": "{cc}"},
            ),
        ),
        returns={"ok": True},
    ),
    "skip": Tool(
        description="Decline a line of the task and say why.",
        parameters=_object(
            line={"type": "integer"}, why={"type": "string", "enum": ["item", "stock", "rule", "scope"]}
        ),
        effects=(Effect(do="append", path="skipped", value={"line": "{line}", "why": "{why}"}),),
        returns={"ok": True},
    ),
    "finish": Tool(
        description="End the task.",
        parameters=_object(),
        effects=(Effect(do="set", path="finished", value=True),),
        returns={"ok": True},
        is_final=True,
    ),
}
_LOGS = ("orders", "approvals", "moves", "messages", "skipped")


def render_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a tool call as the one line of JSON that the agent writes."""
    return json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))


@dataclass(frozen=True)
class Rules:
    """What binds every later call; None where there is no such rule."""

    avoid: str | None = None
    limit: int | None = None
    courier: str | None = None
    approver: str | None = None
    approve_above: int | None = None
    cc: str | None = None
    total: int | None = None

    def as_account(self) -> dict[str, Any]:
        """Return the rules as the account tool reports them."""
        given = {
            "avoid": self.avoid,
            "limit": self.limit,
            "via": self.courier,
            "approver": self.approver,
            "above": self.approve_above,
            "cc": self.cc,
            "total": self.total,
        }
        return {key: value for key, value in given.items() if value is not None}

    def without(self, name: str) -> Rules:
        """Return the rules with one of them dropped."""
        gone = {"approver": ("approver", "approve_above")}.get(name, (name,))
        return Rules(**{k: (None if k in gone else v) for k, v in self.__dict__.items()})

    def names(self) -> list[str]:
        """Return the names of the rules that are given."""
        return [k for k in ("avoid", "limit", "courier", "approver", "cc", "total") if getattr(self, k) is not None]


@dataclass(frozen=True)
class Line:
    """One numbered line of a task."""

    kind: str  # "buy", "move", "report" or "chat"
    text: str
    slots: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workflow:
    """A task, the world it runs in, and the right calls."""

    task: str
    state: dict[str, Any]
    calls: tuple[tuple[str, dict[str, Any]], ...]
    results: tuple[Any, ...]
    final: dict[str, Any]
    rules: Rules
    lines: tuple[Line, ...]
    account: str | None  # the account that step 1 opens, where the rules are not in the task


def make_catalogue(rng: Random) -> dict[str, dict[str, int]]:
    """Draw one depot's stock: which stores hold how many of each item."""
    catalogue = {}
    for item in rng.sample(ITEMS, 12):
        stores = rng.sample(STORES, rng.randint(2, 4))
        catalogue[item] = {store: rng.randint(1, 40) for store in stores}
    return catalogue


def make_rules(rng: Random) -> Rules:
    """Draw one to four rules."""
    number = rng.choice([1, 2, 2, 3, 3, 4])
    chosen = set(rng.sample(["avoid", "limit", "courier", "approver", "cc", "total", "total"], number))
    return Rules(
        avoid=rng.choice(STORES) if "avoid" in chosen else None,
        limit=rng.randint(3, 15) if "limit" in chosen else None,
        courier=rng.choice(COURIERS) if "courier" in chosen else None,
        approver=rng.choice(PEOPLE) if "approver" in chosen else None,
        approve_above=rng.randint(3, 15) if "approver" in chosen else None,
        cc=rng.choice(PEOPLE) if "cc" in chosen else None,
        total=rng.randint(15, 60) if "total" in chosen else None,
    )


def make_line(rng: Random, catalogue: dict[str, dict[str, int]], rules: Rules, weights: dict[str, int]) -> Line:
    """Draw one line; now and then one that has to be declined."""
    kind = rng.choices(list(weights), weights=list(weights.values()))[0]
    item = (
        rng.choice(UNKNOWN_ITEMS) if kind in ("buy", "report") and rng.random() < 0.04 else rng.choice(list(catalogue))
    )
    person, city = rng.choice(PEOPLE), rng.choice(CITIES)
    if kind == "buy":
        n = rng.randint(1, 20) if rng.random() < 0.93 else rng.randint(35, 60)
        text = rng.choice(
            [
                "buy {n} {item} for {city}",
                "send {n} {item} to {city}",
                "{city} needs {n} {item}",
                "order {n} {item} for {city}",
            ]
        )
        return Line(kind, text.format(n=n, item=item, city=city), {"n": n, "item": item, "city": city})
    if kind == "move":
        store, to = rng.sample(STORES, 2)
        if rules.avoid and rng.random() < 0.3:
            store = rules.avoid if to != rules.avoid else store
        n = rng.randint(1, 12)
        text = rng.choice(
            [
                "move {n} {item} from {store} to {to}",
                "take {n} {item} from {store} over to {to}",
                "shift {n} {item} from {store} to {to}",
            ]
        )
        slots = {"n": n, "item": item, "store": store, "to": to}
        return Line(kind, text.format(**slots), slots)
    if kind == "report":
        store = rng.choice(list(catalogue.get(item, {"north": 1})))
        text = rng.choice(
            [
                "tell {person} how many {item} {store} has",
                "report the {item} count at {store} to {person}",
                "{person} asks for the number of {item} in {store}",
            ]
        )
        slots = {"person": person, "item": item, "store": store}
        return Line(kind, text.format(**slots), slots)
    text = rng.choice(
        [
            "write a poem about the {item}",
            "what is the weather in {city}",
            "tell {person} a joke",
            "draw a picture of the {item}",
            "translate the letter from {city}",
        ]
    )
    return Line(kind, text.format(item=item, city=city, person=person))


def act_on_line(number: int, line: Line, rules: Rules, state: dict[str, Any]) -> list[tuple[str, dict]]:
    """Return the right calls for one line, given the rules and the state at that moment."""
    s, stock = line.slots, state["stock"]
    if line.kind == "chat":
        return [("skip", {"line": number, "why": "scope"})]
    if line.kind == "move":
        if rules.avoid in (s["store"], s["to"]):
            return [("skip", {"line": number, "why": "rule"})]
        n = min(s["n"], rules.limit or s["n"])
        return [("move", {"item": s["item"], "n": n, "store": s["store"], "to": s["to"]})]
    look = ("stock", {"item": s["item"]})
    if s["item"] not in stock:
        return [look, ("skip", {"line": number, "why": "item"})]
    if line.kind == "report":
        told = {"person": s["person"], "item": s["item"], "n": stock[s["item"]][s["store"]]}
        return [look, ("tell", told | ({"cc": rules.cc} if rules.cc else {}))]
    n = min(s["n"], rules.limit or s["n"])
    if rules.total and state["sent"] + n > rules.total:
        return [look, ("skip", {"line": number, "why": "rule"})]
    store = next((k for k, held in stock[s["item"]].items() if held >= n and k != rules.avoid), None)
    if store is None:
        return [look, ("skip", {"line": number, "why": "stock"})]
    order = {"item": s["item"], "n": n, "store": store, "city": s["city"], "via": rules.courier or DEFAULT_COURIER}
    if rules.approver and n > (rules.approve_above or 0):
        return [look, ("approve", {"person": rules.approver, "item": s["item"]}), ("order", order)]
    return [look, ("order", order)]


def make_workflow(
    rng: Random, catalogue: dict[str, dict[str, int]], *, num_calls: int, weights: dict[str, int] = LINE_WEIGHTS
) -> Workflow:
    """Draw a workflow whose right solution takes about `num_calls` calls, at most MAX_CALLS."""
    rules = make_rules(rng)
    by_account = num_calls >= 4 and rng.random() < 0.5
    account = f"{rng.choice('ABCDEFGH')}{rng.randint(10, 99)}"
    state = {
        "stock": catalogue,
        "accounts": {account: rules.as_account()},
        **{log: [] for log in _LOGS},
        "sent": 0,
        "finished": False,
    }
    calls: list[tuple[str, dict]] = [("account", {"id": account})] if by_account else []
    lines: list[Line] = []
    current, results = _run(state, calls)
    while len(calls) < num_calls - 1:
        line = make_line(rng, catalogue, rules, weights)
        new = act_on_line(len(lines) + 1, line, rules, current)
        if len(calls) + len(new) > num_calls - 1 and (lines or len(new) > MAX_CALLS - 1):
            if len(calls) + 1 == num_calls - 1 or rng.random() < 0.5:
                continue
            break
        lines.append(line)
        calls += new
        current, returned = _run(current, new)
        results += returned
    calls.append(("finish", {}))
    final, returned = _run(current, calls[-1:])
    results += returned
    if by_account:
        head = rng.choice(["Open account {a} and keep its rules.", "Account {a}; its rules hold throughout."])
        head = head.format(a=account)
    else:
        head = _rules_text(rng, rules)
    task = head + "\n" + "\n".join(f"{i}. {line.text}" for i, line in enumerate(lines, start=1))
    return Workflow(
        task, state, tuple(calls), tuple(results), final, rules, tuple(lines), account if by_account else None
    )


def _run(state: dict[str, Any], calls: list[tuple[str, dict]]) -> tuple[dict[str, Any], list[Any]]:
    results = []
    for name, arguments in calls:
        state, result = call_tool(TOOLS, state, name, arguments)
        results.append(result)
    return state, results


def _rules_text(rng: Random, rules: Rules) -> str:
    parts = []
    if rules.avoid:
        parts.append(rng.choice(["never use {0}", "avoid {0}", "keep away from {0}"]).format(rules.avoid))
    if rules.limit:
        parts.append(rng.choice(["at most {0} of anything", "no more than {0} at a time"]).format(rules.limit))
    if rules.courier:
        parts.append(rng.choice(["send by {0}", "the courier is {0}", "ship via {0}"]).format(rules.courier))
    if rules.approver:
        parts.append(
            rng.choice(["{0} approves orders above {1}", "ask {0} before ordering over {1}"]).format(
                rules.approver, rules.approve_above
            )
        )
    if rules.cc:
        parts.append(rng.choice(["copy {0} on every message", "cc {0} always"]).format(rules.cc))
    if rules.total:
        parts.append(rng.choice(["at most {0} pieces in all", "stop at {0} pieces in total"]).format(rules.total))
    rng.shuffle(parts)
    return "Rules: " + "; ".join(parts) + "."


def first_binding_calls(workflow: Workflow) -> dict[str, int]:
    """Return, for each rule, the 1-based index of the first call that would differ without it.

    A rule that never matters in this workflow is left out.
    """
    first = {}
    for name in workflow.rules.names():
        other = [("account", {"id": workflow.account})] if workflow.account else []
        state = _run(workflow.state, other)[0]
        for number, line in enumerate(workflow.lines, start=1):
            calls = act_on_line(number, line, workflow.rules.without(name), state)
            state = _run(state, calls)[0]
            other += calls
        other.append(("finish", {}))
        differs = [i for i, (x, y) in enumerate(zip(workflow.calls, other, strict=False), start=1) if x != y]
        if differs:
            first[name] = differs[0]
    return first


def conversation(workflow: Workflow) -> list[dict[str, str]]:
    """Return the right conversation: task, calls and results as chat messages."""
    messages = [{"role": "user", "content": workflow.task}]
    for (name, arguments), result in zip(workflow.calls, workflow.results, strict=True):
        messages.append({"role": "assistant", "content": render_call(name, arguments)})
        messages.append({"role": "tool", "content": render_result(result)})
    return messages[:-1]


def final_checks(workflow: Workflow) -> list[dict[str, Any]]:
    """Return what must hold at the end: every log as the teacher left it, and the finish."""
    checks = [{"path": log, "equals": read_path(workflow.final, log)} for log in _LOGS]
    return [*checks, {"path": "finished", "equals": True}]
