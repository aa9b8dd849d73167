"""A judgement in the forms that others read: a page for people, JUnit for test readers, GitHub's annotations.

Each module turns records into one text and decides nothing; what is written where is the stages' matter. Outputs of
models, names and failures are other people's texts, and each form escapes them its own way.
"""

EXPLANATION, JUNIT = "explanation.json", "junit.xml"  # beside the report: git keeps them
PAGE = "report.html"  # in the product's build folder: it holds the pictures once more
