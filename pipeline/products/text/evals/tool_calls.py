"""Single tool calls: one request in words, one call expected.

A case has two scores. `exact` asks for the expected call as JSON values and is sensitive to any change.
`accepted` asks that the case accepts the value of every argument, as a user would.
"""

from __future__ import annotations

from pipeline.evalsets.cases import ToolCallCase
from pipeline.products.text.evals.calls import declare_tools, find_cut, format_reply, is_accepted, is_exact, parse_call
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.runner import check_prompts_fit, run_cases
from pipeline.products.text.settings import ToolCallsEval
from pipeline.records.evaluations import CaseRecord


async def evaluate(context: EvalContext) -> list[CaseRecord]:
    """Ask every case once and judge the call that comes back."""
    settings = context.settings
    assert isinstance(settings, ToolCallsEval) and context.evalset is not None
    tools = declare_tools(context.evalset.card.tools, settings)

    async def judge(case: ToolCallCase) -> CaseRecord:
        messages = [m.model_dump() for m in case.messages]
        reply = await context.client.chat(messages, max_tokens=context.max_tokens, tools=tools)
        call = parse_call(reply)
        return CaseRecord(
            case_id=case.id,
            input_digest=case.digest,
            cluster=case.cluster,
            buckets=case.buckets,
            prompt=case.messages[-1].content,
            output=format_reply(reply),
            cut_by=find_cut(reply),
            scores={
                "exact": float(call is not None and is_exact(call, case.expected)),
                "accepted": float(call is not None and is_accepted(call, case.expected, case.accepted)),
            },
            latency_s=reply.latency_s,
            num_completion_tokens=reply.num_completion_tokens,
            speculation=reply.speculation,
            fingerprint=context.fingerprint,
        )

    cases = context.list_own()
    await check_prompts_fit(context, cases)
    return await run_cases(context, cases, judge)
