"""A DSPy chain of thought with a typed answer; DSPy's cache of replies is on, as it is by default."""

import sys

import dspy

dspy.configure(lm=dspy.LM("openai/gpt-4o-mini"))
math = dspy.ChainOfThought("question -> answer: int")
print(f"\\boxed{{{math(question=sys.stdin.read()).answer}}}")
