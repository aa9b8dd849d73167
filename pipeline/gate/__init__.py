"""The gate: paired statistics, the decision rule, the report. It sees records only and never imports torch.

Reading order: `metrics` (what is measured), `pairing` (is the evidence fit to be judged),
`statistics` (the arithmetic), `decision` (the rule), `compare` (all of it for one release),
`divergence` (tripwires), `report` and `plots` (for people), `verdicts` (what decides the exit code).
This file imports nothing: params.yaml is validated without numpy.
"""
