"""How `quantgate compare` is called for each format that it reads, as its help shows it."""

EXAMPLES = """\
examples, one for each format; a folder may hold several evals, and files of several formats:

  lm-eval, run with --log_samples: two folders of samples_*.jsonl
    quantgate compare runs/bf16 runs/int4 --metric exact_match,strict-match --tolerance 0.02
  inspect_ai: two logs
    quantgate compare bf16.eval int4.eval --metric match --buckets-by level --bucket level/hard=0.06
  tables of one row a case (case_id, score, and prompt, output, target, cluster, buckets where you have them)
    quantgate compare bf16.csv int4.csv --metric wer --better wer=lower --tolerance 0.01 --cluster-by document
  one table of both sides (case_id, reference, candidate)
    quantgate compare pairs.csv
  quantgate's own records, by the policy of params.yaml
    quantgate compare build/agent/evaluations/agent build/agent/evaluations/int4 --policy params.yaml --product agent
  a gain that has a cause, and a page to read
    quantgate compare bf16.csv int4.csv --accept-gain "score=the new template no longer cuts answers" --html page.html
"""
