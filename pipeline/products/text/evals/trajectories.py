"""Multi-step workflows: the model calls simulated tools until it ends, and the final state is judged.

Each turn is one request through the endpoint with the whole conversation so far. Text that is no
call ends the workflow, as does a final tool, the turn limit, or a conversation that outgrows the
context: a model that rambles until then has not completed its task. The score is 1 when every check
of the case holds in the final state: how the model got there does not matter, where it got to does.
"""

from __future__ import annotations

from typing import Any

from pipeline.errors import RequestError, ToolError
from pipeline.evalsets.cases import TrajectoryCase
from pipeline.products.text.evals.calls import (
    continue_conversation,
    declare_tools,
    find_cut,
    format_reply,
    parse_call,
    same_value,
)
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.runner import check_prompts_fit, run_cases
from pipeline.products.text.evals.tools import call_tool, read_path, render_result
from pipeline.products.text.settings import TrajectoriesEval
from pipeline.records.evaluations import OUTGROWN, CaseRecord
from pipeline.records.speculation import sum_speculation

TEMPLATE_TOKENS = 64  # what a chat template may add to a turn
_TOO_LONG = (400, 413, 422)  # HTTP statuses by which servers refuse a prompt; others refuse the key, or the model


async def evaluate(context: EvalContext) -> list[CaseRecord]:
    """Run every workflow to its end and judge the state it leaves."""
    settings = context.settings
    assert isinstance(settings, TrajectoriesEval) and context.evalset is not None
    declared = context.evalset.card.tools
    tools = declare_tools(declared, settings)

    async def judge(case: TrajectoryCase) -> CaseRecord:
        try:
            return await run(case)
        finally:
            context.client.end_session(case.id)

    async def run(case: TrajectoryCase) -> CaseRecord:
        messages: list[dict[str, Any]] = [m.model_dump() for m in case.messages]
        state, turns, replies = case.state, [], []
        longest = 0  # tokens that the conversation has at most; unknown before the first reply
        for _ in range(settings.max_turns):
            try:
                reply = await context.client.chat(messages, max_tokens=context.max_tokens, tools=tools, session=case.id)
            except RequestError as refused:
                has_room = longest + context.max_tokens <= context.context_length
                if has_room or refused.status not in _TOO_LONG:
                    raise
                turns.append(OUTGROWN)
                break
            turns.append(format_reply(reply))
            replies.append(reply)
            if (call := parse_call(reply)) is None:
                break
            state, result = call_tool(declared, state, call.name, call.arguments)
            if call.name in declared and declared[call.name].is_final:
                break
            rendered = render_result(result)
            messages += continue_conversation(reply, rendered)
            longest = reply.num_prompt_tokens + reply.num_completion_tokens + len(rendered.encode()) + TEMPLATE_TOKENS
        return CaseRecord(
            case_id=case.id,
            input_digest=case.digest,
            cluster=case.cluster,
            buckets=case.buckets,
            prompt=case.messages[-1].content,
            output="\n".join(turns),
            cut_by=find_cut(*replies),
            scores={"completed": float(is_completed(case, state))},
            latency_s=sum(reply.latency_s for reply in replies),
            num_completion_tokens=sum(reply.num_completion_tokens for reply in replies),
            speculation=sum_speculation(reply.speculation for reply in replies),
            fingerprint=context.fingerprint,
        )

    cases = context.list_own()
    await check_prompts_fit(context, cases)
    return await run_cases(context, cases, judge)


def is_completed(case: TrajectoryCase, state: dict[str, Any]) -> bool:
    """Tell whether every check of the case holds in a state; a missing field fails its check."""
    try:
        return all(same_value(read_path(state, check.path), check.equals) for check in case.checks)
    except ToolError:
        return False
