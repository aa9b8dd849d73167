"""A judgement in the forms that others read: a page for people, JUnit for test readers, GitHub's annotations.

Each module turns records into one text and decides nothing; what is written where is the stages' matter. Outputs of
models, names and failures are other people's texts, and each form escapes them its own way.
"""
